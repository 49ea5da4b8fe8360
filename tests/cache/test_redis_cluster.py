"""`RedisStore` on a cluster of three nodes, one of which is slow or gone."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import pytest
from redis import Redis

from agentspec.cache.codec import Keys
from agentspec.cache.redis_store import RedisStore
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory
from tests.redis_process import Server, cluster

SCOPES = [Scope(tenant, "model") for tenant in ("calm", "slow", "gone")]
CALM, SLOW, GONE = ([Trajectory(f"run-{number}", scope) for number in range(60)] for scope in SCOPES)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Server]]:
    with cluster() as found:
        yield found


def run(nodes: list[Server], body: Callable[[RedisStore], Awaitable[None]], deadline_ms: int = 2000) -> None:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in nodes)

    async def inner() -> None:
        store = RedisStore(CacheConfig(redis_url=f"redis+cluster://{hosts}", deadline_ms=deadline_ms))
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(asyncio.wait_for(inner(), 30))


async def drained(store: RedisStore) -> None:
    while len(store.outbox):
        await asyncio.sleep(0.01)


def test_every_trajectory_lives_on_one_node_and_all_nodes_are_used(nodes: list[Server]) -> None:
    async def body(store: RedisStore) -> None:
        for number, trajectory in enumerate(CALM):
            await store.append(trajectory, np.arange(number, number + 5000))
        await drained(store)
        for number, trajectory in enumerate(CALM):
            assert (await store.load(trajectory)).tolist() == list(range(number, number + 5000))
        assert set(await store.recent(SCOPES[0], 99)) == {trajectory.id for trajectory in CALM}
        assert await store.delete(CALM[0]) is True
        assert (await store.load(CALM[0])).size == 0
        assert store.stats()["store_errors_total"] == 0

    run(nodes, body)
    for server in nodes:
        with Redis(port=server.port) as client:
            kept = {key.decode() for key in client.keys()}  # noqa: SIM118
        own = [trajectory for trajectory in CALM if Keys.of(trajectory).tokens in kept]
        assert 5 < len(own) < 40
        assert all(Keys.of(trajectory).meta in kept for trajectory in own)


def test_rds_05_one_slow_node_delays_nobody_on_the_others(nodes: list[Server]) -> None:
    async def body(store: RedisStore) -> None:
        for trajectory in SLOW:
            await store.append(trajectory, [1, 2, 3])
        await drained(store)
        lanes = {trajectory.id: store.calls.lane(Keys.of(trajectory).tokens) for trajectory in SLOW}
        slow = f"127.0.0.1:{nodes[0].port}"
        assert len(set(lanes.values())) == 3
        nodes[0].pause()
        try:
            for trajectory in SLOW:
                began = time.monotonic()
                loaded = await store.load(trajectory)
                assert time.monotonic() - began < 1
                assert (loaded.size == 0) == (lanes[trajectory.id] == slow)
                await store.append(trajectory, [4])
            others = [lane for lane in set(lanes.values()) if lane != slow]
            while any(store.outbox.lanes.get(lane) for lane in others):
                await asyncio.sleep(0.01)
            assert store.calls.breaker("read", slow).open
            assert not any(store.calls.breaker("read", lane).open for lane in others)
        finally:
            nodes[0].resume()
        await drained(store)
        while any([(await store.load(trajectory)).size < 4 for trajectory in SLOW]):
            await asyncio.sleep(0.05)

    run(nodes, body, deadline_ms=200)


@pytest.mark.slow
def test_rds_02_a_node_that_is_gone_opens_its_breaker_alone(nodes: list[Server]) -> None:
    async def body(store: RedisStore) -> None:
        for trajectory in GONE:
            await store.append(trajectory, [1, 2, 3])
        await drained(store)
        gone = f"127.0.0.1:{nodes[2].port}"
        lanes = {trajectory.id: store.calls.lane(Keys.of(trajectory).tokens) for trajectory in GONE}
        nodes[2].kill()
        for _ in range(3):
            for trajectory in GONE:
                began = time.monotonic()
                await store.load(trajectory)
                assert time.monotonic() - began < 1
        healthy = [trajectory for trajectory in GONE if lanes[trajectory.id] != gone]
        loaded = [(await store.load(trajectory)).size for trajectory in healthy]
        assert sum(size > 0 for size in loaded) > len(healthy) * 0.9
        assert store.stats()["store_breaker_open"] == 1
        nodes[2].start()

    run(nodes, body, deadline_ms=200)
