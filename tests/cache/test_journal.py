"""The file of a `FileStore`: under which names it is opened, who may read it, and which records are none."""

import asyncio
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache.codec import Chunk, pack, unpack
from agentspec.cache.file_store import FileStore
from agentspec.cache.inventory import of_file
from agentspec.cache.journal import FRAME, HEAD, START, Journal, encode, file_at, read
from agentspec.config import CacheConfig
from agentspec.errors import ConfigError
from agentspec.types import Scope, Trajectory

RUN = Trajectory("run", Scope("tenant", "model"))
SETTING = "AGENTSPEC_CACHE_HISTORY_FILE"


def add(path: Path, *tokens: int, delete: bool = False) -> None:
    """A process that appends tokens to a trajectory, and may delete it then."""

    async def run() -> None:
        store = FileStore(CacheConfig(history_file=str(path)))
        await store.append(RUN, tokens)
        if delete:
            assert await store.delete(RUN) is True
        await store.close()

    asyncio.run(run())


def held(path: Path) -> list[int]:
    return [token for record in read(path.read_bytes()).records for token in record.tokens.tolist()]


def test_a_link_is_followed_and_stays_one(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "real" / "histories"
    real.parent.mkdir()
    link.symlink_to(real)
    add(link, 1, 2)
    assert link.is_symlink() and held(real) == [1, 2]
    add(link, 3, delete=True)
    assert link.is_symlink() and held(real) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "real"]


def test_two_names_of_one_file_are_one_file(tmp_path: Path) -> None:
    real, link, folder = tmp_path / "real", tmp_path / "link", tmp_path / "folder"
    link.symlink_to(real)
    folder.symlink_to(tmp_path)
    journal = Journal(real)
    for other in (link, folder / "real", folder / "link", tmp_path / "x" / ".." / "real"):
        with pytest.raises(ConfigError, match="in use by another process"):
            Journal(other)
    journal.close()


def test_a_file_with_a_second_name_is_refused(tmp_path: Path) -> None:
    add(tmp_path / "file", 1)
    os.link(tmp_path / "file", tmp_path / "second")
    with pytest.raises(ConfigError, match=f"{SETTING}.*file.*hard link"):
        Journal(tmp_path / "file")
    os.unlink(tmp_path / "second")
    Journal(tmp_path / "file").close()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_stands_where_the_file_is_written_anew_is_replaced_and_not_written_to(tmp_path: Path, kind: str) -> None:
    victim, new = tmp_path / "victim", tmp_path / "histories.new"
    victim.write_text("precious")
    if kind == "link":
        new.symlink_to(victim)
    else:
        new.write_text("left by a process that was killed")
    journal = Journal(tmp_path / "histories")
    assert not os.path.lexists(new), "what a killed process left holds histories too"
    if kind == "link":
        new.symlink_to(victim)
    journal.rewrite([b"x"])
    journal.write(b"y")
    assert journal.contents() == START + b"xy"
    journal.close()
    assert victim.read_text() == "precious" and not (tmp_path / "histories").is_symlink()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "histories.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=r"cannot open .*histories\.lock"):
        Journal(tmp_path / "histories")
    assert not (tmp_path / "victim").exists()


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "histories"
    add(path, 1)
    path.chmod(0o644)
    Journal(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "could be read by others" in caplog.text
    caplog.clear()
    Journal(path).close()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/proc/self/no-such-file", "No such file or directory"),
        ("/proc/self/status", "No such file or directory"),
        ("pipe", "it is no plain file"),
        (".", "it is no plain file"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_a_strange_path_is_told_by_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    before = sorted(os.listdir())
    with pytest.raises(ConfigError, match=f"{SETTING}: cannot open '{path}': {why}"):
        Journal(Path(path))
    assert sorted(os.listdir()) == before, "no lock is left for what is never opened"


@pytest.mark.parametrize("setting", ["~no-such-user/histories", "a\0b"])
def test_a_setting_that_is_no_path_is_named(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{SETTING}: .* is no path"):
        file_at(setting)
    with pytest.raises(ConfigError, match=f"{SETTING}: .* is no path"):
        FileStore(CacheConfig(history_file=setting))


def record(number: int, names: tuple[bytes, bytes, bytes] = (b"tenant", b"model", b"bad")) -> bytes:
    """A record of one number, a token plus 1, whose check is right."""
    payload = HEAD.pack(1.7e9, 1, 1, 4, *map(len, names)) + b"".join(names) + struct.pack("<I", number)
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


@pytest.mark.parametrize("number", [2**31 + 1, 2**32 - 1])
def test_what_is_no_token_is_damage_wherever_it_is_read(tmp_path: Path, number: int) -> None:
    path, good = tmp_path / "histories", encode(RUN, np.array([1, -1, 2**31 - 1], np.int32), 1, 1.7e9)
    path.write_bytes(START + good + record(number) + good)
    found = read(path.read_bytes())
    assert [part.tokens.tolist() for part in found.records] == [[1, -1, 2**31 - 1]]
    assert found.end == len(START + good) and not found.torn
    assert of_file(path).problems == [f"is damaged at byte {found.end} of {found.size}"]
    FileStore(CacheConfig(history_file=str(path))).journal.close()
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1


@pytest.mark.parametrize("number", [2**31 + 1, 2**32 - 1])
def test_what_is_no_token_is_an_unreadable_chunk(number: int) -> None:
    whole = pack(RUN, Chunk(1, 0, np.array([2**31 - 1], np.int32)))
    assert unpack(RUN, whole) is not None
    check = zlib.crc32(repr((4, 1, 0)).encode(), zlib.crc32(b"tenant:model:run"))
    body = struct.pack("<I", number)
    assert unpack(RUN, whole[:22] + struct.pack("<I", zlib.crc32(body, check)) + body) is None


def test_a_name_that_is_no_text_is_damage_and_no_other_kind_of_file() -> None:
    good = encode(RUN, np.array([1], np.int32), 1, 1.7e9)
    found = read(START + good + record(5, (b"tenant", b"model", b"\xff\xfe")) + good)
    assert len(found.records) == 1 and not found.torn
