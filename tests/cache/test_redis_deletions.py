"""Deletions in Redis that meet something else: a read under way, a Redis that does not answer, or one that is full."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis import Redis

from agentspec.cache import redis_store
from agentspec.cache.codec import Keys
from agentspec.cache.redis_store import RedisStore
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory
from tests.redis_process import Server
from tests.slow_proxy import SlowProxy

SCOPE = Scope("tenant", "model")
RUN = Trajectory("run", SCOPE)


def run(server: Server, body: Callable[[RedisStore, SlowProxy], Awaitable[None]]) -> None:
    """A body on a store that has a trajectory, behind a proxy."""

    async def inner() -> None:
        async with SlowProxy(server.port, 0.0) as proxy:
            store = RedisStore(CacheConfig(redis_url=proxy.url, deadline_ms=2000))
            await store.append(RUN, [1, 2, 3])
            await store.flush()
            await body(store, proxy)
            await store.close()

    asyncio.run(asyncio.wait_for(inner(), 30))


@pytest.mark.parametrize("by_another", [False, True])
def test_a_read_that_began_before_a_deletion_gives_nothing(redis_server: Server, by_another: bool) -> None:
    async def body(store: RedisStore, proxy: SlowProxy) -> None:
        proxy.delay_s = 0.1
        loading = asyncio.ensure_future(store.load(RUN))
        await asyncio.sleep(0.02)
        if by_another:
            store.disown(RUN)
        else:
            assert await store.delete(RUN) is True
        assert (await loading).tolist() == []
        proxy.delay_s = 0.0
        await store.delete(RUN)
        await store.append(RUN, [7])
        await store.flush()
        assert (await store.load(RUN)).tolist() == [7]
        assert store.stats()["store_gone_total"] == 0

    run(redis_server, body)


def test_nothing_is_read_of_what_a_redis_that_hangs_is_still_to_delete(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "WRITE_S", 0.05)

    async def body(store: RedisStore, proxy: SlowProxy) -> None:
        proxy.delay_s = 0.3
        assert await store.delete(RUN) is None
        assert (await store.load(RUN)).tolist() == [] and (await store.news(RUN)).tolist() == []
        await store.append(RUN, [7])
        proxy.delay_s = 0.0
        for _ in range(100):
            await store.flush()
            if not len(store.outbox):
                break
        assert (await store.load(RUN)).tolist() == [7]
        assert not store.deleting

    run(redis_server, body)


def test_a_redis_without_memory_still_deletes(redis_server: Server) -> None:
    async def body(store: RedisStore, proxy: SlowProxy) -> None:
        with Redis.from_url(redis_server.url) as client:
            client.config_set("maxmemory", 1)
            try:
                assert await store.delete(RUN) is True
                assert not client.exists(Keys.of(RUN).tokens) and await store.recent(SCOPE, 9) == []
                assert await store.delete(RUN) is False
            finally:
                client.config_set("maxmemory", 0)

    run(redis_server, body)
