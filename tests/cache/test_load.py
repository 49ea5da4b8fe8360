"""Two processes that write and read many long trajectories while their Redis dies, returns, slows down and fills up."""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.cache.load import Load
from tests.redis_process import Server
from tests.slow_proxy import SlowProxy

ROOT = Path(__file__).resolve().parents[2]


async def phase(seconds: float, shown: Callable[[], bool]) -> None:
    """So many seconds, and on a machine that is slow until something has shown."""
    await asyncio.sleep(seconds)
    while not shown():
        await asyncio.sleep(0.02)


async def troubles(
    server: Server, proxy: SlowProxy, seconds: float, found: Callable[[], bool], skipped: Callable[[], bool]
) -> None:
    """What befalls a Redis, each for some time: it dies once something was `found`, and for so long that calls were
    `skipped`."""
    await phase(seconds, found)
    server.kill()
    await phase(seconds / 2, skipped)
    server.start()
    await asyncio.sleep(seconds)
    proxy.delay_s = 2.0
    await asyncio.sleep(seconds)
    proxy.delay_s = 0.0
    await asyncio.sleep(seconds)
    with Redis.from_url(server.url) as client:
        client.config_set("maxmemory", max(int(client.info("memory")["used_memory"]), 1))
        await asyncio.sleep(seconds)
        client.config_set("maxmemory", 0)
    await asyncio.sleep(seconds)


def judge(loads: Sequence[dict[str, Any]]) -> None:
    """No call failed, no token was wrong, nobody waited long, and every write is accounted for."""
    assert sum(load["found"] for load in loads) > 0
    for load in loads:
        stats = load["stats"]
        assert load["failed"] == [] and load["wrong"] == []
        assert load["slowest_ms"] < load["deadline_ms"] + 2000
        done = sum(stats[f"store_{name}_total"] for name in ("appended", "dropped", "withdrawn", "gone", "newer_left"))
        assert stats["store_appends_total"] == done + stats["store_queue_writes"] > 0
        assert stats["store_errors_total"] > 0 and stats["store_skipped_total"] > 0
        assert stats["store_unreadable_total"] == stats["store_refused_total"] == 0


def test_rds_10_two_stores_under_load_with_a_redis_in_trouble(redis_server: Server) -> None:
    async def run() -> list[dict[str, Any]]:
        async with SlowProxy(redis_server.port, 0.0) as proxy:
            loads = [Load(proxy.url, number, 8, 1000, 200) for number in range(2)]

            def found() -> bool:
                return any(load.found for load in loads)

            def skipped() -> bool:
                return all(load.stats.get("store_skipped_total") for load in loads)

            trouble = asyncio.ensure_future(troubles(redis_server, proxy, 0.5, found, skipped))
            await asyncio.gather(*(load.run(lambda: not trouble.done(), 0.05) for load in loads))
            await trouble
            return [asdict(load) for load in loads]

    judge(asyncio.run(asyncio.wait_for(run(), 60)))


@pytest.mark.slow
def test_rds_10_sixty_four_long_trajectories_of_two_processes(redis_server: Server) -> None:
    arguments = ["64", "4000", "100", "0.1"]

    async def start(url: str, number: int) -> Process:
        words = [sys.executable, "-m", "tests.cache.load", url, str(number), *arguments]
        return await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE, cwd=ROOT)

    async def run() -> list[dict[str, Any]]:
        async with SlowProxy(redis_server.port, 0.0) as proxy:
            processes = [await start(proxy.url, number) for number in range(2)]
            began = time.monotonic()
            await troubles(redis_server, proxy, 10.0, lambda: True, lambda: True)
            outputs = await asyncio.gather(*(process.communicate(b"") for process in processes))
            print(f"{time.monotonic() - began:.0f} s")
            return [json.loads(output) for output, _ in outputs]

    loads = asyncio.run(asyncio.wait_for(run(), 280))
    for load in loads:
        load["written"] = sorted(load["written"].values())
        print(json.dumps(load))
    judge(loads)
    assert min(tokens for load in loads for tokens in load["written"]) >= 200_000
