"""What every `HistoryStore` does, for each of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.file_store import FileStore
from agentspec.cache.redis_store import RedisStore
from agentspec.cache.store import ENTRY_BYTES, HistoryStore, MemoryStore, Stored, make_store
from agentspec.config import CacheConfig
from agentspec.errors import ConfigError
from agentspec.types import Scope, Trajectory

SCOPE = Scope("tenant", "model")
RUN = Trajectory("run", SCOPE)

Body = Callable[[HistoryStore], Awaitable[None]]


@pytest.fixture(params=["memory", "file", "redis"])
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Body], None]:
    """Runs a test's body on a fresh store."""
    make: dict[str, Callable[[], HistoryStore]] = {
        "memory": lambda: MemoryStore(64 * 1024**2, CacheConfig().trajectory_tokens),
        "file": lambda: FileStore(CacheConfig(history_file=str(tmp_path / "histories"))),
        "redis": lambda: RedisStore(
            CacheConfig(redis_url=request.getfixturevalue("redis_server").url, deadline_ms=2000)
        ),
    }

    async def run(body: Body) -> None:
        store = make[request.param]()
        try:
            await body(store)
        finally:
            await store.close()

    return lambda body: asyncio.run(run(body))


def test_appended_tokens_come_back_in_order(check: Callable[[Body], None]) -> None:
    async def body(store: HistoryStore) -> None:
        await store.append(RUN, [1, 2, 3])
        await store.append(RUN, np.array([4, 5], np.int64))
        await store.append(RUN, [])
        await store.flush()
        assert (await store.load(RUN)).tolist() == [1, 2, 3, 4, 5]

    check(body)


def test_a_long_history_comes_back_whole(check: Callable[[Body], None]) -> None:
    async def body(store: HistoryStore) -> None:
        tokens = np.random.default_rng(1).integers(0, 50_000, 100_000)
        await store.append(RUN, tokens)
        await store.flush()
        assert np.array_equal(await store.load(RUN), tokens)

    check(body)


def test_only_the_newest_tokens_are_kept(check: Callable[[Body], None]) -> None:
    async def body(store: HistoryStore) -> None:
        limit = CacheConfig().trajectory_tokens
        await store.append(RUN, np.arange(limit))
        await store.append(RUN, [7, 8])
        await store.flush()
        loaded = await store.load(RUN)
        assert loaded.size == limit
        assert loaded[[0, -1]].tolist() == [2, 8]

    check(body)


def test_unknown_trajectories_are_empty(check: Callable[[Body], None]) -> None:
    async def body(store: HistoryStore) -> None:
        assert (await store.load(RUN)).tolist() == []
        assert await store.recent(SCOPE, 10) == []
        await store.delete(RUN)

    check(body)


def test_recent_lists_the_last_written_first(check: Callable[[Body], None]) -> None:
    async def body(store: HistoryStore) -> None:
        for name in ("first", "second", "third", "first"):
            await store.append(Trajectory(name, SCOPE), [1])
            await store.flush()
        assert await store.recent(SCOPE, 10) == ["first", "third", "second"]
        assert await store.recent(SCOPE, 2) == ["first", "third"]
        assert await store.recent(SCOPE, 0) == []

    check(body)


def test_deleted_trajectories_are_gone(check: Callable[[Body], None]) -> None:
    async def body(store: HistoryStore) -> None:
        await store.append(RUN, [1])
        await store.flush()
        await store.append(RUN, [2])
        await store.delete(RUN)
        await store.append(Trajectory("other", SCOPE), [3])
        await store.flush()
        assert (await store.load(RUN)).tolist() == []
        assert await store.recent(SCOPE, 10) == ["other"]

    check(body)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Trajectory("run", Scope("org_1", "2345")), Trajectory("run", Scope("org_12345", ""))),
        (Trajectory("run", Scope("a:b", "c")), Trajectory("run", Scope("a", "b:c"))),
        (Trajectory("run", Scope("a", "b")), Trajectory("run", Scope("a}", "b"))),
        (Trajectory("b:run", Scope("a", "")), Trajectory("run", Scope("a", "b"))),
        (Trajectory("run", Scope("a%3A", "b")), Trajectory("run", Scope("a:", "b"))),
        (Trajectory("ü", SCOPE), Trajectory("u", SCOPE)),
    ],
)
def test_prx_14_similar_names_stay_apart(check: Callable[[Body], None], first: Trajectory, second: Trajectory) -> None:
    async def body(store: HistoryStore) -> None:
        await store.append(first, [1])
        await store.append(second, [2])
        await store.flush()
        assert (await store.load(first)).tolist() == [1]
        assert (await store.load(second)).tolist() == [2]
        assert first.id in await store.recent(first.scope, 10)
        if first.scope != second.scope:
            assert await store.recent(first.scope, 10) == [first.id]

    check(body)


@pytest.mark.parametrize("tokens", [[None], ["a"], [2**40]])
def test_rds_04_what_is_no_token_is_counted_and_never_raises(check: Callable[[Body], None], tokens: list[Any]) -> None:
    async def body(store: HistoryStore) -> None:
        await store.append(RUN, tokens)
        await store.flush()
        assert (await store.load(RUN)).tolist() == []
        assert store.stats()["store_refused_total"] == 1

    check(body)


@pytest.mark.parametrize("tokens", [[-2], [5, -7]])
def test_rds_04_redis_takes_no_negative_tokens_but_boundaries(redis_server: Any, tokens: list[int]) -> None:
    async def body() -> None:
        store = RedisStore(CacheConfig(redis_url=redis_server.url, deadline_ms=2000))
        await store.append(RUN, tokens)
        await store.append(RUN, [4, -1, 5])
        await store.flush()
        assert (await store.load(RUN)).tolist() == [4, -1, 5]
        assert store.stats()["store_refused_total"] == 1
        await store.close()

    asyncio.run(body())


def test_what_is_stored_is_described(check: Callable[[Body], None]) -> None:
    async def body(store: HistoryStore) -> None:
        assert await store.describe(RUN) is None
        before = time.time()
        await store.append(RUN, range(70_000))
        await store.append(RUN, [1])
        await store.flush()
        found = await store.describe(RUN)
        assert isinstance(found, Stored)
        assert (found.tokens, found.turns) == (70_001, 2)
        assert 2 * 70_000 < found.bytes < 5 * 70_000
        assert before - 2 < found.updated <= time.time() + 2

    check(body)


def test_deleting_tells_whether_there_was_something(check: Callable[[Body], None]) -> None:
    async def body(store: HistoryStore) -> None:
        await store.append(RUN, [1, 2])
        await store.flush()
        assert [await store.delete(RUN), await store.delete(RUN)] == [True, False]
        assert await store.describe(RUN) is None
        await store.append(RUN, [3])
        await store.flush()
        assert (await store.load(RUN)).tolist() == [3]

    check(body)


def test_memory_store_keeps_its_byte_bound() -> None:
    size = 200 + ENTRY_BYTES

    async def run() -> None:
        store = MemoryStore(5 * size, 100)
        for number in range(10):
            await store.append(Trajectory(f"run-{number}", SCOPE), range(50))
            assert store.stats()["store_bytes"] <= 5 * size
        assert store.stats()["store_evictions_total"] == 5
        assert await store.recent(SCOPE, 99) == [f"run-{number}" for number in (9, 8, 7, 6, 5)]

    asyncio.run(run())


def test_one_scope_cannot_push_another_out_of_memory() -> None:
    size = 200 + ENTRY_BYTES

    async def run() -> None:
        store = MemoryStore(5 * size, 100, scope_bytes=3 * size)
        await store.append(Trajectory("quiet", Scope("small", "model")), range(50))
        for number in range(10):
            await store.append(Trajectory(f"run-{number}", SCOPE), range(50))
        assert await store.recent(Scope("small", "model"), 9) == ["quiet"]
        assert await store.recent(SCOPE, 9) == ["run-9", "run-8", "run-7"]
        assert store.bytes == sum(store.bytes_of.values()) == 4 * size

    asyncio.run(run())


def test_memory_store_forgets_what_was_written_too_long_ago() -> None:
    now = [1000.0]

    async def run() -> None:
        store = MemoryStore(1 << 20, 100, ttl_s=10, clock=lambda: now[0])
        await store.append(RUN, [1])
        now[0] = 1011.0
        assert (await store.load(RUN)).size == 0
        assert await store.recent(SCOPE, 9) == []
        await store.append(Trajectory("other", SCOPE), [1])
        assert store.stats()["store_trajectories"] == 1

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-5000.0, -3.0, 0.0, 0.5, 3.0, 11.0, 4000.0])), max_size=25)
)
def test_whatever_a_clock_does_nothing_too_old_stays_and_nothing_new_leaves(writes: list[tuple[int, float]]) -> None:
    """Beside a twin that knows the true order: a clock that is set back makes nothing older, and nothing younger."""
    now, dates = [1e6], dict[str, float]()

    async def run() -> None:
        store = MemoryStore(1 << 20, 100, ttl_s=10, clock=lambda: now[0])
        for which, step in writes:
            now[0] += step
            await store.append(Trajectory(str(which), SCOPE), [1])
            dates.update({name: min(date, now[0]) for name, date in dates.items()}, **{str(which): now[0]})
            for name in [name for name, date in dates.items() if date + 10 < now[0]]:
                del dates[name]
            assert {name for _, name in store.kept} >= set(dates)
            assert all(now[0] - 10.01 <= entry.updated <= now[0] for entry in store.kept.values())
            assert set(await store.recent(SCOPE, 9)) == set(dates)

    asyncio.run(run())


def test_a_file_and_a_redis_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AGENTSPEC_CACHE_REDIS_URL and AGENTSPEC_CACHE_HISTORY_FILE"):
        make_store(CacheConfig(redis_url="redis://localhost", history_file=str(tmp_path / "file")))
    assert make_store(CacheConfig()) is None


def test_a_wrong_url_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"AGENTSPEC_CACHE_REDIS_URL.*'http://\.\.\.@host'") as caught:
        make_store(CacheConfig(redis_url="http://user:secret@host"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://host/0?no_such_option=1", "redis://host:99999", "redis://[::1", "junk"])
def test_a_url_that_no_connection_can_be_made_from_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="AGENTSPEC_CACHE_REDIS_URL must be a Redis URL, got"):
        make_store(CacheConfig(redis_url=url))
