"""`FileStore`: what survives restarts, torn writes, damage, full disks and a second process."""

import asyncio
import logging
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache import file_store
from agentspec.cache.file_store import FileStore
from agentspec.cache.inventory import of_file
from agentspec.cache.journal import START, encode, read
from agentspec.cache.store import MemoryStore
from agentspec.config import CacheConfig
from agentspec.errors import ConfigError, StoreError
from agentspec.types import Scope, Trajectory
from tests.full_disk import full_disk

SCOPE = Scope("tenant", "model")
RUN = Trajectory("run", SCOPE)
OTHER = Trajectory("ü/other", Scope("t:1", "m"))


def config(path: Path, **settings: Any) -> CacheConfig:
    return CacheConfig(history_file=str(path), **settings)


def with_store(path: Path, body: Callable[[FileStore], Awaitable[None]], **settings: Any) -> None:
    """A body on a store, closed afterwards."""

    async def run() -> None:
        store = FileStore(config(path, **settings))
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def kept(path: Path, **settings: Any) -> dict[str, list[int]]:
    """The tokens by trajectory that a new process finds."""
    found: dict[str, list[int]] = {}

    async def look(store: FileStore) -> None:
        for (_, name), entry in store.kept.items():
            found[name] = entry.tokens.tolist()

    with_store(path, look, **settings)
    return found


def test_histories_survive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "histories"

    async def fill(store: FileStore) -> None:
        await store.append(RUN, range(10_000))
        await store.append(OTHER, [5])
        await store.append(RUN, [-1, 7])
        await store.flush()

    async def check(store: FileStore) -> None:
        assert (await store.load(RUN)).tolist() == [*range(10_000), -1, 7]
        assert (await store.load(OTHER)).tolist() == [5]
        described = await store.describe(RUN)
        assert described is not None and described.turns == 2
        assert await store.recent(SCOPE, 9) == ["run"]
        assert list(store.kept)[-1] == (SCOPE, "run")

    with_store(path, fill)
    with_store(path, check)
    assert path.stat().st_mode & 0o777 == 0o600


TURNS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(-1, 2**31 - 2), min_size=1, max_size=9)), max_size=6)


@settings(max_examples=20, deadline=None)
@given(TURNS)
def test_a_file_cut_at_any_byte_gives_the_writes_before_it(turns: list[tuple[int, list[int]]]) -> None:
    names = [Trajectory(name, SCOPE) for name in ("a", "b", "c")]
    parts = [encode(names[which], np.array(tokens, np.int32), 1, 1.0) for which, tokens in turns]
    data = START + b"".join(parts)
    ends = np.cumsum([len(START), *map(len, parts)]).tolist()
    for size in range(len(data) + 1):
        found = read(data[:size])
        whole = sum(end <= size for end in ends) - 1
        assert [record.tokens.tolist() for record in found.records] == [tokens for _, tokens in turns[: max(whole, 0)]]
        assert [record.trajectory for record in found.records] == [names[which] for which, _ in turns[: max(whole, 0)]]
        assert found.end == (ends[whole] if whole >= 0 else 0)
        assert found.torn
        assert found.whole == (size in ends or size == 0)


def test_a_store_goes_on_after_a_cut_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "histories"
    first, second = (encode(RUN, np.array(tokens, np.int32), 1, 4e9) for tokens in ([1, 2], [3]))
    data = START + first + second
    for size in range(0, len(data) + 1):
        path.write_bytes(data[:size])
        before = [1, 2] * (size >= len(START + first)) + [3] * (size == len(data))
        assert kept(path).get("run", []) == before
        with_store(path, lambda store: store.append(RUN, [9]))
        assert kept(path) == {"run": [*before, 9]}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["histories", "histories.lock"]


def test_zeros_that_a_crash_left_at_the_end_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "histories"
    path.write_bytes(START + encode(RUN, np.array([1], np.int32), 1, 4e9) + bytes(4096))
    assert kept(path) == {"run": [1]}
    assert len(list(tmp_path.glob("*.damaged-*"))) == 0
    assert path.stat().st_size < 200


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_byte_never_gives_a_wrong_token(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    source, path = random.Random(seed), tmp_path / "histories"
    turns = [[source.randrange(50_000) for _ in range(50)] for _ in range(8)]
    data = bytearray(START + b"".join(encode(RUN, np.array(turn, np.int32), 1, 4e9) for turn in turns))
    at = source.randrange(len(START), len(data))
    data[at] ^= 1 << source.randrange(8)
    path.write_bytes(data)
    found = kept(path).get("run", [])
    assert found == [token for turn in turns for token in turn][: len(found)]
    assert len(found) % 50 == 0 and len(found) < 400
    aside = list(tmp_path.glob("histories.damaged-*"))
    assert [copy.read_bytes() for copy in aside] in ([bytes(data)], [])
    assert ("is damaged from byte" in caplog.text) == bool(aside)
    assert aside or "were not written whole" in caplog.text
    assert kept(path).get("run", []) == found


@pytest.mark.parametrize("content", [b"SQLite format 3\x00" * 9, b"{}", bytes(range(256))])
def test_another_kind_of_file_is_kept_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "histories"
    path.write_bytes(content)
    with_store(path, lambda store: store.append(RUN, [1]))
    assert kept(path) == {"run": [1]}
    (aside,) = tmp_path.glob("histories.damaged-*")
    assert aside.read_bytes() == content
    assert str(aside) in caplog.text


def test_a_file_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "histories"
    path.write_bytes(START[:-2] + b"\x09\x00" + b"unknown")
    with pytest.raises(ConfigError, match="AGENTSPEC_CACHE_HISTORY_FILE: the file is of version 9"):
        FileStore(config(path))
    assert path.read_bytes().endswith(b"unknown")


def test_a_second_process_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "histories"
    code = f"from agentspec.cache.journal import Journal, Path\nJournal(Path({str(path)!r}))"

    async def body(store: FileStore) -> None:
        with pytest.raises(ConfigError, match=r"AGENTSPEC_CACHE_HISTORY_FILE.*in use by another process"):
            FileStore(config(path))
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "in use by another process" in other.stderr

    with_store(path, body)
    with_store(path, lambda store: store.append(RUN, [1]))


@pytest.mark.parametrize("place", ["folder", "file/below"])
def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"AGENTSPEC_CACHE_HISTORY_FILE.*{place}"):
        FileStore(config(tmp_path / place))


def test_a_full_disk_goes_on_in_memory_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "histories"

    async def body(store: FileStore) -> None:
        await store.append(RUN, [1])
        await store.flush()
        with full_disk():
            await store.append(RUN, [2])
            await store.flush()
            assert (await store.load(RUN)).tolist() == [1, 2]
            assert store.stats()["store_file_behind"] == 1
            assert store.stats()["store_errors_total"] == 1
            assert await store.delete(Trajectory("unknown", SCOPE)) is False
            assert await store.delete(RUN) is None
        monkeypatch.setattr(file_store, "RETRY_S", 0.0)
        store.retry_at = 0.0
        await store.append(RUN, [3])
        await store.flush()
        assert store.stats()["store_file_behind"] == 0

    with_store(path, body)
    assert "the disk is full" in caplog.text
    assert kept(path) == {"run": [3]}


def test_the_file_stays_within_its_size_and_keeps_the_newest(tmp_path: Path) -> None:
    path, most = tmp_path / "histories", 2 * 1024**2

    async def body(store: FileStore) -> None:
        for number in range(400):
            await store.append(Trajectory(f"run-{number % 150}", SCOPE), np.full(4000, number))
            if number % 5 == 0:
                await store.flush()
                assert path.stat().st_size <= most
        await store.flush()
        assert store.stats()["store_file_rewrites_total"] > 0
        assert store.stats()["store_evictions_total"] > 0

    with_store(path, body, history_file_bytes=most, trajectory_tokens=10_000)
    found = kept(path, history_file_bytes=most, trajectory_tokens=10_000)
    assert list(found)[-1] == "run-99"
    assert 10 < len(found) < 150
    assert found["run-99"] == [99 + 150] * 4000 + [99 + 300] * 4000 or found["run-99"][-4000:] == [399] * 4000


def test_a_deleted_trajectory_is_not_in_the_file_any_more(tmp_path: Path) -> None:
    path = tmp_path / "histories"
    secret = Trajectory("the-secret", SCOPE)

    async def body(store: FileStore) -> None:
        await store.append(secret, [1, 2])
        await store.append(RUN, [3])
        await store.flush()
        assert b"the-secret" in path.read_bytes()
        assert await store.delete(secret) is True
        assert b"the-secret" not in path.read_bytes()

    with_store(path, body)
    assert kept(path) == {"run": [3]}


def test_what_is_too_old_leaves_memory_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "histories"
    path.write_bytes(
        START + encode(RUN, np.array([1], np.int32), 1, 1000.0) + encode(OTHER, np.array([2], np.int32), 1, 4e9)
    )
    assert kept(path, ttl_s=3600) == {OTHER.id: [2]}
    assert len(read(path.read_bytes()).records) == 1


def test_what_waits_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_store, "PENDING_BYTES", 10_000)
    path = tmp_path / "histories"

    async def body(store: FileStore) -> None:
        for number in range(100):
            await store.append(Trajectory(f"run-{number}", SCOPE), np.full(2000, number))
            assert store.pending_bytes <= 10_000
        await store.flush()

    caplog.set_level(logging.WARNING)
    with_store(path, body)
    assert kept(path) == {f"run-{number}": [number] * 2000 for number in range(100)}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400), st.booleans()), max_size=25))
def test_a_file_gives_what_memory_alone_would_have(actions: list[tuple[int, int, bool]]) -> None:
    """Appends, deletions and restarts in any order."""
    import tempfile

    async def run(folder: str) -> None:
        path = Path(folder) / "histories"
        twin, store = MemoryStore(1 << 30, 1000), FileStore(config(path, trajectory_tokens=1000))
        for which, size, restart in actions:
            trajectory = Trajectory(f"run-{which}", SCOPE)
            for each in (twin, store):
                await (each.append(trajectory, range(size)) if size > 20 else each.delete(trajectory))
            if restart:
                await store.close()
                store = FileStore(config(path, trajectory_tokens=1000))
        await store.close()
        store = FileStore(config(path, trajectory_tokens=1000))
        assert await store.recent(SCOPE, 9) == await twin.recent(SCOPE, 9)
        for name in await twin.recent(SCOPE, 9):
            assert (await store.load(Trajectory(name, SCOPE))).tolist() == (
                await twin.load(Trajectory(name, SCOPE))
            ).tolist()
        await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(folder))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"AGENTSPEC_CACHE_HISTORY_FILE.*it is no plain file"):
        FileStore(config(path))
    with pytest.raises(StoreError, match=r"cannot read .*: it is no plain file"):
        of_file(path)
