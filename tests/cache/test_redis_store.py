"""`RedisStore` when Redis is gone, silent, restarted, full of other things or half empty."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np
import pytest
from redis import Redis

from agentspec.cache import redis_calls, redis_store
from agentspec.cache.breaker import Breaker
from agentspec.cache.codec import Chunk, Keys, ScopeKeys, join, pack, unpack
from agentspec.cache.draft import compile_kernels
from agentspec.cache.history import BOUNDARY
from agentspec.cache.outbox import Kind, Outbox, Write
from agentspec.cache.redis_calls import READERS
from agentspec.cache.redis_store import RedisStore
from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory

SCOPE = Scope("tenant", "model")
RUN = Trajectory("run", SCOPE)


class Server(Protocol):
    """The fixture of `conftest.py`."""

    url: str

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def run(url: str, body: Callable[[RedisStore], Awaitable[None]], deadline_ms: int = 2000, **options: Any) -> None:
    """A test's body on a store, closed afterwards."""

    async def inner() -> None:
        store = RedisStore(CacheConfig(redis_url=url, deadline_ms=deadline_ms), **options)
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(asyncio.wait_for(inner(), 20))


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds; the test's own time limit ends a vain wait."""
    while not await holds():
        await asyncio.sleep(0.02)


def test_every_key_expires_and_has_the_documented_name(redis_server: Server) -> None:
    async def body(store: RedisStore) -> None:
        await store.append(RUN, [1, 2])
        await store.flush()

    run(redis_server.url, body)
    with Redis.from_url(redis_server.url) as client:
        lifetimes = {name.decode(): client.ttl(name) for name in client.keys()}  # noqa: SIM118
        assert set(lifetimes) == {
            "as:{tenant:model:run}:tok",
            "as:{tenant:model:run}:meta",
            "as:{tenant:model}:recent",
            "as:{tenant:model}:sizes",
        }
        assert all(0 < lifetime <= CacheConfig().ttl_s for lifetime in lifetimes.values())
        assert client.hget("as:{tenant:model:run}:meta", "tokens") == b"2"


def test_values_and_the_list_of_recent_trajectories_are_bounded(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MAX_RECENT", 30)

    async def body(store: RedisStore) -> None:
        for number in range(50):
            await store.append(Trajectory(f"run-{number}", SCOPE), [1])
        await store.append(RUN, np.arange(20_000))
        await eventually(lambda: done(store))

    async def done(store: RedisStore) -> bool:
        return not len(store.outbox)

    run(redis_server.url, body)
    with Redis.from_url(redis_server.url) as client:
        chunks = client.lrange(Keys.of(RUN).tokens, 0, -1)
        assert len(chunks) == 5
        assert max(len(chunk) for chunk in chunks) < 17_000
        assert client.zcard(ScopeKeys.of(SCOPE).recent) == 30
        assert len(client.keys("as:*:tok")) == 30


def test_no_redis_at_start_is_a_miss_and_a_later_start_is_picked_up(redis_server: Server) -> None:
    redis_server.kill()

    async def body(store: RedisStore) -> None:
        assert (await store.load(RUN)).size == 0
        assert await store.recent(SCOPE, 5) == []
        await store.append(RUN, [1, 2])
        assert store.stats()["store_errors_total"] >= 2
        redis_server.start()

        async def arrived() -> bool:
            return (await store.load(RUN)).size == 2

        await eventually(arrived)
        assert store.stats()["store_breaker_open"] == 0

    run(redis_server.url, body)


def test_rds_07_a_restart_while_idle_costs_the_first_call_nothing(redis_server: Server) -> None:
    async def body(store: RedisStore) -> None:
        await store.append(RUN, [1])
        await store.flush()
        assert (await store.load(RUN)).size == 1
        redis_server.kill()
        redis_server.start()
        await store.append(RUN, [2, 3])
        await store.flush()
        assert (await store.load(RUN)).tolist() == [2, 3]
        assert store.stats()["store_errors_total"] == 0

    run(redis_server.url, body)


def test_a_kill_in_the_middle_raises_nothing_and_is_counted(redis_server: Server) -> None:
    async def body(store: RedisStore) -> None:
        for turn in range(20):
            if turn == 5:
                redis_server.kill()
            await store.append(RUN, [turn])
            await store.load(RUN)
        stats = store.stats()
        assert stats["store_breaker_open"] == 1
        assert stats["store_errors_total"] >= 3
        assert stats["store_skipped_total"] >= 5

    run(redis_server.url, body)


def test_rds_01_a_paused_redis_costs_one_deadline_at_a_time_and_then_nothing(redis_server: Server) -> None:
    async def body(store: RedisStore) -> None:
        await store.append(RUN, [1, 2])
        await store.flush()
        redis_server.pause()
        for _ in range(50):
            async with asyncio.timeout(2):
                assert (await store.load(RUN)).size == 0
        assert store.stats()["store_breaker_open"] == 1
        assert store.stats()["store_errors_total"] < 10
        redis_server.resume()

        async def answered() -> bool:
            return (await store.load(RUN)).size == 2

        await eventually(answered)

    run(redis_server.url, body, deadline_ms=200)


def test_rds_01_a_request_goes_on_without_drafts_from_a_paused_redis(redis_server: Server) -> None:
    compile_kernels()
    redis_server.pause()

    async def body(store: RedisStore) -> None:
        histories = Histories(CacheConfig(), store)
        async with asyncio.timeout(2):
            session = await histories.open(RUN, [1, 2, 3, 1, 2])
        assert session.propose(4).token[1] == 3
        session.close()
        assert histories.stats()["store_errors_total"] > 0
        redis_server.resume()
        await histories.close()

    run(redis_server.url, body, deadline_ms=20)


def test_rds_11_half_evicted_keys_read_as_shorter_or_absent(redis_server: Server) -> None:
    tokens = list(range(10_000))

    async def body(store: RedisStore) -> None:
        await store.append(RUN, tokens)
        await store.flush()
        with Redis.from_url(redis_server.url) as client:
            key = Keys.of(RUN).tokens
            client.delete(Keys.of(RUN).meta)
            assert (await store.load(RUN)).tolist() == tokens
            client.lpop(key)
            assert (await store.load(RUN)).tolist() == tokens[4096:]
            chunks = client.lrange(key, 0, -1)
            client.lset(key, 0, chunks[0][:-1])
            assert (await store.load(RUN)).tolist() == tokens[8192:]
            assert store.stats()["store_unreadable_total"] == 1
            client.delete(key)
        assert (await store.load(RUN)).size == 0
        await store.append(RUN, [5])
        await store.flush()
        assert (await store.load(RUN)).tolist() == [5]

    run(redis_server.url, body)


def test_a_key_of_another_type_is_a_miss_and_counted(redis_server: Server) -> None:
    async def body(store: RedisStore) -> None:
        with Redis.from_url(redis_server.url) as client:
            client.set(Keys.of(RUN).tokens, b"no list")
        assert (await store.load(RUN)).size == 0
        assert store.stats()["store_errors_total"] == 1
        await store.append(RUN, [1])
        await store.append(Trajectory("other", SCOPE), [2])

        async def written() -> bool:
            return (await store.load(Trajectory("other", SCOPE))).size == 1

        async def dropped() -> bool:
            return store.stats()["store_dropped_total"] == 1

        await eventually(written)
        await eventually(dropped)

    run(redis_server.url, body)


def test_rds_08_a_burst_of_reads_is_skipped_and_counted_apart(redis_server: Server) -> None:
    async def body(store: RedisStore) -> None:
        await asyncio.gather(*(store.load(RUN) for _ in range(READERS + 30)))
        assert store.stats()["store_busy_total"] == 30
        assert store.stats()["store_errors_total"] == 0
        assert store.stats()["store_breaker_open"] == 0

    run(redis_server.url, body)


def test_rds_10_the_queue_is_bounded_and_drops_its_oldest(redis_server: Server) -> None:
    redis_server.pause()

    async def body(store: RedisStore) -> None:
        for writer in range(64):
            await store.append(Trajectory(f"run-{writer}", SCOPE), np.arange(10**8, 10**8 + 20_000))
        stats = store.stats()
        assert stats["store_queue_bytes"] <= 400_000
        assert stats["store_dropped_total"] == 60
        redis_server.resume()
        await store.flush()

        async def written() -> bool:
            return (await store.load(Trajectory("run-63", SCOPE))).size == 20_000

        await eventually(written)
        assert (await store.load(Trajectory("run-10", SCOPE))).size == 0

    run(redis_server.url, body, outbox_bytes=400_000)


def test_sfx_04_a_second_process_takes_over(redis_server: Server) -> None:
    compile_kernels()
    text = list(range(1000, 1100))

    async def body(store: RedisStore) -> None:
        first = Histories(CacheConfig(), store)
        session = await first.open(RUN, text)
        session.close()
        await first.flush()
        other = RedisStore(CacheConfig(redis_url=redis_server.url, deadline_ms=2000))
        second = Histories(CacheConfig(), other)
        taken = await second.open(RUN, [*text, 1, *text[:10]], frozenset({"trajectory"}))
        kept = await first.open(RUN, [*text, 1, *text[:10]], frozenset({"trajectory"}))
        assert taken.propose(8) == kept.propose(8)
        assert taken.propose(8).token == tuple(text[9:18])
        taken.close()
        await second.flush()
        assert (await store.load(RUN)).tolist() == [*text, 1, *text[:10]]
        await second.close()

    run(redis_server.url, body)


def test_chunks_that_do_not_follow_each_other_are_kept_apart() -> None:
    def chunk(identity: int, previous: int, *tokens: int) -> Chunk:
        return Chunk(identity, previous, np.array(tokens, np.int32))

    first, second, third = chunk(1, 0, 10, 11), chunk(2, 1, 12), chunk(3, 2, 13)
    assert join([first, second, third]).tolist() == [10, 11, 12, 13]
    assert join([first, third]).tolist() == [10, 11, BOUNDARY, 13]
    assert join([first, second, second, third]).tolist() == [10, 11, 12, 13]
    assert join([first, second, first, third]).tolist() == [10, 11, 12, 13]
    assert join([third]).tolist() == [13]
    assert join([]).tolist() == []


def test_damaged_chunks_are_not_read() -> None:
    data = pack(RUN, Chunk(1, 0, np.array([5, 6], np.int32)))
    read = unpack(RUN, data)
    assert read is not None
    assert read.tokens.tolist() == [5, 6]
    for at in range(len(data)):
        assert unpack(RUN, data[:at]) is None
        assert unpack(RUN, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None
    assert unpack(RUN, b"") is None


def test_rds_02_the_breaker_knows_outcomes_only() -> None:
    now = [0.0]
    breaker = Breaker(lambda: now[0], failures=2, pause_s=1.0)
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    now[0] = 1.0
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.failed()
    now[0] = 1.9
    assert not breaker.allows()
    now[0] = 2.0
    assert breaker.allows()
    breaker.succeeded()
    assert not breaker.open


def test_an_outbox_forgets_one_trajectory() -> None:
    outbox = Outbox(10_000)
    for name in ("a", "b", "a"):
        outbox.put(Write(Trajectory(name, SCOPE), Kind.APPEND, (b"x",), 1))
    outbox.forget(Trajectory("a", SCOPE, parent="any"))
    outbox.put(Write(Trajectory("a", SCOPE), Kind.DELETE))
    outbox.forget(Trajectory("a", SCOPE, parent="any"))
    assert [(write.trajectory.id, write.kind) for write in outbox] == [("b", Kind.APPEND), ("a", Kind.DELETE)]
    assert outbox.bytes == 257 + 256


def test_a_closed_store_answers_and_writes_nothing(redis_server: Server) -> None:
    async def body(store: RedisStore) -> None:
        await store.append(RUN, [1])
        await store.close()
        await store.append(RUN, [2])
        assert (await store.load(RUN)).size == 0
        assert store.stats()["store_dropped_total"] == 1

    run(redis_server.url, body)


def test_closing_while_redis_is_paused_ends_with_more_in_flight_than_sockets_hold(redis_server: Server) -> None:
    async def body(store: RedisStore) -> None:
        await store.append(RUN, [1])
        await store.flush()
        redis_server.pause()
        await store.append(RUN, np.zeros(3_500_000, np.int32))
        reads = [asyncio.create_task(store.load(RUN)) for _ in range(READERS)]
        await asyncio.sleep(0.05)
        await store.close()
        assert all(answer.size == 0 for answer in await asyncio.gather(*reads))
        assert [writer.done() for writer in store.writers.values()] == [True]
        redis_server.kill()
        await asyncio.sleep(0.1)

    run(redis_server.url, body)


class Stubborn:
    """A client that never finishes to close, some even when they are told to stop."""

    def __init__(self, cancels: int) -> None:
        self.cancels = cancels

    async def aclose(self) -> None:
        for _ in range(self.cancels + 1):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if not self.cancels:
                    raise
                self.cancels -= 1
        raise OSError("closed badly")


@pytest.mark.parametrize("cancels", [0, 1])
def test_a_client_that_does_not_close_is_given_up(cancels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_calls, "CLOSE_S", 0.05)

    async def inner() -> None:
        store = RedisStore(CacheConfig(redis_url="redis://127.0.0.1:1/0"))
        await store.calls.client.aclose()
        store.calls.client = Stubborn(cancels)  # type: ignore[assignment]
        await store.close()

    asyncio.run(asyncio.wait_for(inner(), 20))
