"""What a deletion leaves in a history file and beside it: nothing, whatever memory holds and however often it fails."""

import asyncio
import errno
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache import file_store
from agentspec.cache.file_store import FileStore
from agentspec.cache.journal import START, encode, read
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory
from tests.full_disk import full_disk

SCOPE = Scope("tenant", "model")
RUN = Trajectory("the-secret", SCOPE)
OTHER = Trajectory("other", SCOPE)
NOW = 1.7e9


def with_store(path: Path, body: Callable[[FileStore], Awaitable[None]], **settings: Any) -> None:
    """A body on a store, closed afterwards."""

    async def run() -> None:
        store = FileStore(CacheConfig(history_file=str(path), **settings))
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def written(path: Path) -> set[str]:
    """Ids of the trajectories that a file has records of."""
    return {record.trajectory.id for record in read(path.read_bytes()).records}


def put(path: Path, *records: tuple[Trajectory, list[int], float], then: bytes = b"") -> None:
    """A file of records."""
    path.write_bytes(
        START + b"".join(encode(one, np.array(tokens, np.int32), 1, at) for one, tokens, at in records) + then
    )


def test_what_left_memory_for_space_is_deleted_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "histories"

    async def body(store: FileStore) -> None:
        await store.append(RUN, [1, 2])
        await store.append(OTHER, range(200))
        await store.flush()
        assert [name for _, name in store.kept] == ["other"] and written(path) == {"the-secret", "other"}
        assert await store.delete(RUN) is True
        assert b"the-secret" not in path.read_bytes() and written(path) == {"other"}
        assert await store.delete(RUN) is False

    with_store(path, body, scope_bytes=1500)


def test_what_a_start_found_no_room_for_is_deleted_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "histories"

    async def fill(store: FileStore) -> None:
        await store.append(RUN, [1, 2])
        await store.append(OTHER, range(200))

    async def body(store: FileStore) -> None:
        assert [name for _, name in store.kept] == ["other"] and written(path) == {"the-secret", "other"}
        assert await store.delete(RUN) is True
        assert written(path) == {"other"}

    with_store(path, fill)
    with_store(path, body, scope_bytes=1500)


ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["append", "delete", "full", "open"])), max_size=12)


@settings(max_examples=25, deadline=None)
@given(ACTIONS)
def test_the_file_holds_nothing_that_was_deleted_since_it_was_written(actions: list[tuple[int, str]]) -> None:
    """Whatever left memory before and whatever failed: an answer of True or False is kept, and None is made up for."""

    async def run(path: Path) -> None:
        store, present = FileStore(CacheConfig(history_file=str(path), scope_bytes=1800)), set[str]()
        for which, action in actions:
            trajectory = Trajectory(f"run-{which}", SCOPE)
            if action == "append":
                await store.append(trajectory, range(100))
                present.add(trajectory.id)
            elif action == "open":
                await store.close()
                store = FileStore(CacheConfig(history_file=str(path), scope_bytes=1800))
            elif action == "full":
                with full_disk():
                    answers = [await store.delete(trajectory) for _ in range(2)]
                    assert answers in ([None, None], [False, False])
                    assert answers[0] is None or trajectory.id not in written(path)
                    present.discard(trajectory.id)
            else:
                answer = await store.delete(trajectory)
                present.discard(trajectory.id)
                assert answer is not None and trajectory.id not in written(path)
                assert not answer or written(path) <= present
        await store.close()
        assert written(path) <= present

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder) / "histories"))


def test_a_deletion_that_failed_is_asked_for_again_and_never_unknown_while_the_file_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "histories"

    async def body(store: FileStore) -> None:
        await store.append(RUN, [1])
        await store.append(OTHER, [2])
        await store.flush()
        with full_disk():
            assert [await store.delete(RUN) for _ in range(3)] == [None, None, None]
            assert store.stats()["store_file_behind"] == 1
        assert await store.delete(RUN) is True
        assert written(path) == {"other"} and store.stats()["store_file_behind"] == 0
        assert await store.delete(RUN) is False

    with_store(path, body)


def test_a_write_that_fails_while_a_deletion_waits_for_it_is_not_the_deletion_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, deleting = tmp_path / "histories", threading.Event()

    def fails(data: bytes) -> None:
        deleting.wait(10)
        raise OSError(errno.ENOSPC, "no space left")

    async def body(store: FileStore) -> None:
        await store.append(RUN, [1])
        await store.flush()
        monkeypatch.setattr(store.journal, "write", fails)
        await store.append(OTHER, [2])
        answer = asyncio.ensure_future(store.delete(RUN))
        await asyncio.sleep(0.05)
        deleting.set()
        assert await answer is True and written(path) == {"other"}

    with_store(path, body)


def test_a_deletion_that_failed_is_made_up_for_without_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "histories"
    monkeypatch.setattr(file_store, "RETRY_S", 0.05)

    async def body(store: FileStore) -> None:
        await store.append(RUN, [1])
        await store.flush()
        with full_disk():
            assert await store.delete(RUN) is None
            await asyncio.sleep(0.15)
            assert written(path) == {"the-secret"}
        await asyncio.sleep(0.15)
        assert written(path) == set() and store.stats()["store_file_behind"] == 0
        assert await store.delete(RUN) is False

    with_store(path, body)


def test_a_file_that_could_not_be_cleaned_at_the_start_is_cleaned_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "histories"
    monkeypatch.setattr(file_store, "RETRY_S", 0.05)
    put(path, (RUN, [1], 1000.0), (OTHER, [2], 4e9))

    async def run() -> None:
        with full_disk():
            store = FileStore(CacheConfig(history_file=str(path)))
            assert store.stats()["store_file_behind"] == 1
        assert (await store.load(OTHER)).tolist() == [2]
        await asyncio.sleep(0.2)
        assert written(path) == {"other"}
        await store.close()

    asyncio.run(run())


def test_a_clock_that_is_set_back_holds_up_no_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "histories"
    monkeypatch.setattr(file_store, "RETRY_S", 0.05)

    async def body(store: FileStore) -> None:
        store.clock = lambda: NOW
        await store.append(RUN, [1])
        await store.flush()
        with full_disk():
            assert await store.delete(RUN) is None
        store.clock = lambda: NOW - 1e6
        await asyncio.sleep(0.2)
        assert written(path) == set()

    with_store(path, body)


def test_a_date_in_the_future_counts_as_now_and_shields_nothing(tmp_path: Path) -> None:
    path = tmp_path / "histories"
    put(path, (RUN, [1], 4e9), (OTHER, [2], NOW))

    async def run() -> None:
        now = [NOW + 5]
        store = FileStore(CacheConfig(history_file=str(path), ttl_s=10), clock=lambda: now[0])
        described = await store.describe(RUN)
        assert described is not None and described.updated == NOW + 5
        now[0] = NOW + 11
        await store.append(Trajectory("third", SCOPE), [3])
        await store.flush()
        assert written(path) == {"the-secret", "third"}
        now[0] = NOW + 16
        await store.append(Trajectory("third", SCOPE), [3])
        await store.flush()
        assert written(path) == {"third"}
        await store.close()

    asyncio.run(run())


def test_a_damaged_copy_that_names_a_deleted_trajectory_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "histories"
    put(path, (OTHER, [2], 4e9), then=b"\x00" * 40 + encode(RUN, np.array([7], np.int32), 1, 4e9) + b"tail")
    foreign = tmp_path / "histories.damaged-1"
    foreign.write_bytes(b"something else")

    async def body(store: FileStore) -> None:
        assert store.stats()["store_file_damaged_copies"] == 2
        (aside,) = set(tmp_path.glob("histories.damaged-*")) - {foreign}
        assert b"the-secret" in aside.read_bytes()
        assert await store.delete(Trajectory("secret-of-nobody", SCOPE)) is False
        assert aside.exists()
        assert await store.delete(RUN) is True
        assert not aside.exists() and foreign.exists()
        assert store.stats()["store_file_damaged_copies"] == 1
        assert await store.delete(RUN) is False

    with_store(path, body)


def test_a_damaged_copy_that_cannot_be_removed_leaves_a_deletion_unconfirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = tmp_path / "histories", tmp_path / "histories.damaged-1"
    put(copy, (RUN, [1], NOW), then=b"damage")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    async def body(store: FileStore) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            assert await store.delete(RUN) is None
        assert await store.delete(RUN) is True
        assert not copy.exists()

    with_store(path, body)


@pytest.mark.parametrize("tokens", [[-2], [5, -7]])
def test_negative_tokens_are_refused_and_not_stored(tmp_path: Path, tokens: list[int]) -> None:
    path = tmp_path / "histories"

    async def body(store: FileStore) -> None:
        await store.append(RUN, tokens)
        await store.append(RUN, [4, -1, 5])
        assert (await store.load(RUN)).tolist() == [4, -1, 5]
        assert store.stats()["store_refused_total"] == 1

    with_store(path, body)
    assert [record.tokens.tolist() for record in read(path.read_bytes()).records] == [[4, -1, 5]]
