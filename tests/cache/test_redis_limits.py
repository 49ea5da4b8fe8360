"""`RedisStore`: what a write costs, repeats and leaves alone; limits of a scope; deletions that others hear of."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from redis import Redis

from agentspec.cache.codec import Chunk, Keys, ScopeKeys, digest_of, pack
from agentspec.cache.outbox import Kind
from agentspec.cache.redis_store import RedisStore
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory
from tests.redis_process import Server
from tests.slow_proxy import SlowProxy

SCOPE = Scope("tenant", "model")
RUN = Trajectory("run", SCOPE)


@pytest.fixture
def client(redis_server: Server) -> Iterator[Redis]:
    with Redis.from_url(redis_server.url) as found:
        yield found


def run(url: str, body: Callable[..., Awaitable[None]], stores: int = 1, **settings: Any) -> None:
    """A test's body on stores of the same Redis, closed afterwards."""

    async def inner() -> None:
        config = CacheConfig(**{"redis_url": url, "deadline_ms": 2000, **settings})
        opened = [RedisStore(config) for _ in range(stores)]
        try:
            await body(*opened)
        finally:
            for store in opened:
                await store.close()

    asyncio.run(asyncio.wait_for(inner(), 30))


def asked(client: Redis, monitor: Any) -> list[str]:
    """Names of the commands that others sent since the monitor began, those that scripts ran left out."""
    client.echo("end")
    names: list[str] = []
    while True:
        told = monitor.next_command()
        name = str(told["command"]).split(" ", 1)[0].upper()
        if name == "ECHO":
            return names
        if told["client_type"] != "lua" and name not in ("HELLO", "CLIENT", "SELECT"):
            names.append(name)


def test_opening_a_trajectory_is_one_round_trip(redis_server: Server, client: Redis) -> None:
    async def body(store: RedisStore) -> None:
        await store.append(RUN, np.arange(200_000))
        await store.flush()
        watching: Any = client
        with watching.monitor() as monitor:
            assert (await store.load(RUN)).size == 200_000
            assert asked(client, monitor) == ["EVAL"]
            await store.append(RUN, [1, 2])
            await store.flush()
            assert asked(client, monitor) == ["EVAL", "EVAL"]
            assert (await store.news(RUN)).size == 0
            assert asked(client, monitor) == ["EVAL"]

    run(redis_server.url, body)


def test_tokens_take_two_bytes_where_that_suffices(redis_server: Server, client: Redis) -> None:
    async def body(store: RedisStore) -> None:
        for name, largest in (("small", 49_000), ("large", 150_000), ("huge", 2**31 - 1)):
            await store.append(Trajectory(name, SCOPE), np.full(10_000, largest))
        await store.flush()
        for name, width in (("small", 2), ("large", 3), ("huge", 4)):
            stored = sum(map(len, client.lrange(Keys.of(Trajectory(name, SCOPE)).tokens, 0, -1)))
            assert width * 10_000 < stored < width * 10_000 + 200
            assert (await store.load(Trajectory(name, SCOPE))).size == 10_000

    run(redis_server.url, body)


def test_a_repeated_write_is_stored_once(redis_server: Server) -> None:
    async def body(store: RedisStore) -> None:
        write = store.appending(RUN, np.arange(10_000, dtype=np.int32))
        assert [await store.add(write), await store.add(write)] == [True, True]
        assert (await store.load(RUN)).tolist() == list(range(10_000))
        described = await store.describe(RUN)
        assert described is not None and (described.tokens, described.turns) == (10_000, 1)

    run(redis_server.url, body)


def test_the_limit_of_tokens_holds_in_redis_too(redis_server: Server, client: Redis) -> None:
    async def body(store: RedisStore) -> None:
        for turn in range(30):
            await store.append(RUN, np.full(1000, turn))
        await store.flush()
        assert client.llen(Keys.of(RUN).tokens) == 5
        described = await store.describe(RUN)
        assert described is not None and described.tokens == 5000
        assert (await store.load(RUN)).tolist() == np.repeat(range(25, 30), 1000).tolist()

    run(redis_server.url, body, trajectory_tokens=5000)


def test_what_a_newer_version_wrote_is_left_alone_and_reported(redis_server: Server, client: Redis) -> None:
    later = b"\x7f" + pack(RUN, Chunk(5, 0, np.arange(3, dtype=np.int32)))[1:]

    async def body(store: RedisStore) -> None:
        client.rpush(Keys.of(RUN).tokens, later)
        assert (await store.load(RUN)).size == 0
        await store.append(RUN, [1, 2])
        await store.flush()
        assert client.lrange(Keys.of(RUN).tokens, 0, -1) == [later]
        assert store.stats()["store_newer_read_total"] == store.stats()["store_newer_left_total"] == 1
        assert store.stats()["store_unreadable_total"] == 0
        await store.evict(RUN)
        assert client.exists(Keys.of(RUN).tokens) == 1
        assert await store.delete(RUN) is True
        assert client.exists(Keys.of(RUN).tokens) == 0

    run(redis_server.url, body)


def test_a_chunk_is_read_under_no_other_name(redis_server: Server, client: Redis) -> None:
    others = [
        Trajectory("run", Scope("thief", "model")),
        Trajectory("run", Scope("tenant", "other")),
        Trajectory("x", SCOPE),
    ]

    async def body(store: RedisStore) -> None:
        await store.append(RUN, [1, 2, 3])
        await store.flush()
        for other in others:
            client.copy(Keys.of(RUN).tokens, Keys.of(other).tokens)
            assert (await store.load(other)).size == 0
        assert store.stats()["store_unreadable_total"] == len(others)

    run(redis_server.url, body)


def test_a_scope_keeps_its_bytes_and_leaves_others_theirs(redis_server: Server, client: Redis) -> None:
    small = Trajectory("quiet", Scope("small", "model"))

    async def body(store: RedisStore) -> None:
        await store.append(small, np.arange(4000))
        for number in range(10):
            await store.append(Trajectory(f"run-{number}", SCOPE), np.arange(4000))
            await store.flush()
        assert await store.recent(SCOPE, 99) == ["run-9", "run-8", "run-7"]
        assert client.exists(Keys.of(Trajectory("run-6", SCOPE)).tokens) == 0
        assert (await store.load(small)).size == 4000
        assert store.stats()["store_evicted_total"] == 7
        assert client.hlen(ScopeKeys.of(SCOPE).sizes) == 3

    run(redis_server.url, body, scope_bytes=25_000)


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-ttl", "allkeys-random"])
def test_rds_11_a_redis_at_its_limit_of_memory_is_read_and_never_wrong(
    redis_server: Server, client: Redis, policy: str
) -> None:
    runs = [Trajectory(f"run-{number}", SCOPE) for number in range(12)]

    async def body(store: RedisStore) -> None:
        await store.append(RUN, np.arange(1000))
        await store.flush()
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 500_000)
        for number, trajectory in enumerate(runs):
            await store.append(trajectory, np.arange(number, number + 50_000))
        while len(store.outbox):
            await asyncio.sleep(0.01)
        for number, trajectory in enumerate(runs):
            loaded = await store.load(trajectory)
            assert np.array_equal(loaded, np.arange(number, number + 50_000)[50_000 - loaded.size :])
        stats = store.stats()
        assert not store.calls.breaker("read", "").open
        if policy == "noeviction":
            assert (await store.load(RUN)).size == 1000
            assert stats["store_errors_total"] > 0

    run(redis_server.url, body)


def test_others_are_told_of_what_is_new_and_of_what_is_deleted(redis_server: Server) -> None:
    async def body(first: RedisStore, second: RedisStore) -> None:
        start = await second.changes(SCOPE, "")
        assert start is not None and start.written == ()
        await first.append(RUN, [1, 2])
        await first.flush()
        told = await second.changes(SCOPE, start.now)
        assert told is not None and (told.written, told.deleted) == (("run",), frozenset())
        assert (await second.news(RUN)).tolist() == [1, 2]
        assert (await second.news(RUN)).tolist() == []
        await second.append(RUN, [3])
        await second.flush()
        await first.append(RUN, [4])
        await first.flush()
        assert (await second.news(RUN)).tolist() == [4]
        assert (await first.news(RUN)).tolist() == [3]
        assert (await first.load(RUN)).tolist() == [1, 2, -1, 3, -1, 4]
        assert await first.delete(RUN) is True
        later = await second.changes(SCOPE, told.now)
        assert later is not None and later.written == ()
        assert later.deleted == {digest_of(RUN)}

    run(redis_server.url, body, stores=2)


def test_a_write_that_continues_a_deleted_trajectory_is_refused(redis_server: Server) -> None:
    async def body(first: RedisStore, second: RedisStore) -> None:
        await first.append(RUN, [1, 2])
        await first.flush()
        assert (await second.load(RUN)).size == 2
        assert await first.delete(RUN) is True
        await second.append(RUN, [3])
        await second.flush()
        assert (await first.load(RUN)).size == 0
        assert second.stats()["store_gone_total"] == 1
        await first.append(RUN, [5])
        await first.append(RUN, [6])
        await first.flush()
        assert (await second.load(RUN)).tolist() == [5, 6]

    run(redis_server.url, body, stores=2)


def test_nothing_of_a_deleted_trajectory_is_left_but_a_hash(redis_server: Server, client: Redis) -> None:
    secret = Trajectory("secret-name", SCOPE)

    async def body(store: RedisStore) -> None:
        await store.append(secret, [1, 2])
        await store.append(RUN, [1])
        await store.flush()
        await store.delete(secret)
        left = [key for key in client.keys() if b"secret" in key]  # noqa: SIM118
        assert left == [Keys.of(secret).gone.encode()]
        assert 0 < client.ttl(left[0]) <= 60
        assert client.zrange(ScopeKeys.of(SCOPE).recent, 0, -1) == [b"run"]
        assert client.hkeys(ScopeKeys.of(SCOPE).sizes) == [b"run"]
        assert client.zrange(ScopeKeys.of(SCOPE).gone, 0, -1) == [digest_of(secret).encode()]

    run(redis_server.url, body)


def test_a_deletion_that_redis_does_not_confirm_is_not_claimed(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.redis_store.WRITE_S", 0.2)

    async def body(store: RedisStore) -> None:
        await store.append(RUN, [1, 2])
        await store.flush()
        redis_server.pause()
        assert await store.delete(RUN) is None
        for _ in range(50):
            await store.append(Trajectory("other", SCOPE), np.arange(4000))
        assert any(write.kind is Kind.DELETE for write in store.outbox)
        redis_server.resume()
        while await store.describe(RUN) is not None:
            await asyncio.sleep(0.01)

    async def small(store: RedisStore) -> None:
        store.outbox.max_bytes = 50_000
        await body(store)
        assert store.stats()["store_dropped_total"] > 0

    run(redis_server.url, small)


def test_a_slow_redis_costs_a_deadline_and_its_connection_is_ready_later(redis_server: Server) -> None:
    async def body() -> None:
        async with SlowProxy(redis_server.port, 0.1) as proxy:
            store = RedisStore(CacheConfig(redis_url=proxy.url, deadline_ms=20))
            assert (await store.load(RUN)).size == 0
            assert store.stats()["store_errors_total"] == 1
            while store.calls.reads:
                await asyncio.sleep(0.01)
            proxy.delay_s = 0.0
            await store.append(RUN, [1])
            await store.flush()
            with Redis.from_url(redis_server.url) as client:
                known = len(client.client_list())
                assert (await store.load(RUN)).size == 1
                assert len(client.client_list()) == known
            await store.close()

    asyncio.run(asyncio.wait_for(body(), 20))
