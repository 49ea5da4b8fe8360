"""Reaching a Redis: TLS, passwords, users, and what is wrong with them in one line."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import redis_store
from agentspec.cache.redis_client import connect
from agentspec.cache.redis_store import RedisStore
from agentspec.config import CacheConfig
from agentspec.errors import ConfigError
from agentspec.types import Scope, Trajectory
from tests.redis_process import free_port, running

RUN = Trajectory("run", Scope("tenant", "model"))
PASSWORD = "p@ss/w:rd #1"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "FLUSH_S", 0.4)


def reaches(**settings: Any) -> bool:
    """Whether something can be stored and read."""

    async def inner() -> bool:
        store = RedisStore(CacheConfig(deadline_ms=3000, **settings))
        await store.append(RUN, [1])
        await store.flush()
        found = (await store.load(RUN)).size
        await store.close()
        return bool(found)

    return asyncio.run(asyncio.wait_for(inner(), 20))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
def tls_port(certificate: tuple[Path, Path]) -> Iterator[int]:
    cert, key = map(str, certificate)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert]
    with running(*options, "--tls-auth-clients", "no"):
        yield port


def test_tls_with_a_file_of_certificates(tls_port: int, certificate: tuple[Path, Path]) -> None:
    url = f"rediss://127.0.0.1:{tls_port}/0"
    assert reaches(redis_url=url, redis_ca_file=str(certificate[0]))
    assert not reaches(redis_url=url)


def test_a_user_with_a_password_in_the_url_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    rules = ["--user", "agent", "on", f">{PASSWORD}", "~as:*", "+@all"]
    with running(*rules, "--requirepass", "another") as server:
        place = f"127.0.0.1:{server.port}/0"
        assert reaches(redis_url=f"redis://agent@{place}", redis_password_file=str(file))
        assert reaches(redis_url=f"redis://:another@{place}")
        assert not reaches(redis_url=f"redis://agent:wrong@{place}")
        assert not reaches(redis_url=f"redis://{place}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"redis_password_file": "missing"}, "AGENTSPEC_CACHE_REDIS_PASSWORD_FILE: cannot read 'missing'"),
        ({"redis_password_file": "empty"}, "AGENTSPEC_CACHE_REDIS_PASSWORD_FILE: 'empty' is empty"),
        ({"redis_url": "redis://a:b@host", "redis_password_file": "full"}, "the URL has a password already"),
        ({"redis_ca_file": "full"}, "AGENTSPEC_CACHE_REDIS_CA_FILE needs a URL that begins with rediss://"),
        ({"redis_url": "rediss://host", "redis_ca_file": "missing"}, "AGENTSPEC_CACHE_REDIS_CA_FILE: there is no file"),
        ({"redis_url": "redis+cluster://host/3"}, "must be a Redis URL, got"),
        ({"redis_url": "redis+cluster://host:x"}, "must be a Redis URL, got"),
        ({"redis_url": "http+cluster://host"}, "must be a Redis URL, got"),
    ],
)
def test_wrong_settings_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("\n")
    Path("full").write_text("secret\n")
    with pytest.raises(ConfigError) as caught:
        connect(replace(CacheConfig(redis_url="redis://host"), **settings), 4)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
