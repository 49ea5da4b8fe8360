"""Histories in a real Redis that dies, comes back and is shared, under an engine that must not notice."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache.retrieval import Histories
from agentspec.cache.store import make_store
from agentspec.config import CacheConfig, Config, ModelConfig
from agentspec.engine.service import Engine
from agentspec.policies.cost import FixedCost
from agentspec.types import GenerationRequest, Report, SamplingParams, Scope, SpeculationParams, Trajectory
from tests.redis_process import Server

DEADLINE_MS = 200
OFF = SpeculationParams(enabled=False)
ONLY_TRAJECTORY = SpeculationParams(drafters=("trajectory",))


@asynccontextmanager
async def engine_on(folder: Path, url: str) -> Any:
    """An engine whose histories go to the Redis at `url`; in this process only if it is empty."""
    cache = CacheConfig(redis_url=url, deadline_ms=DEADLINE_MS)
    config = Config(model=ModelConfig(name=str(folder)), cache=cache)
    engine = Engine.from_folder(config, folder, Histories(cache, make_store(cache) if url else None))
    engine.loop.cost = FixedCost()
    try:
        yield engine
    finally:
        await engine.close()


def within_a_minute(scenario: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(body())


def request(engine: Engine, text: str, run: str, **fields: Any) -> GenerationRequest:
    prompt = engine.render([{"role": "user", "content": text}], None)
    return GenerationRequest(prompt, Trajectory(run, Scope("default", "tiny")), 40, **fields)


async def generated(engine: Engine, wanted: GenerationRequest, then: Callable[[], None] = lambda: None) -> Report:
    """The report of a generation; `then` is called after its third delta."""
    count, report = 0, None
    async for delta in engine.generate(wanted):
        count, report = count + 1, delta.report
        if count == 3:
            then()
    assert report is not None
    return report


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, seed=4)])
def test_redis_killed_in_the_middle_of_a_generation(
    tiny_model: Path, redis_server: Server, sampling: SamplingParams
) -> None:
    async def scenario() -> None:
        async with engine_on(tiny_model, "") as alone:
            expected = await generated(alone, request(alone, "go on", "run", sampling=sampling, speculation=OFF))
        async with engine_on(tiny_model, redis_server.url) as engine:
            wanted = request(engine, "go on", "run", sampling=sampling)
            killed = await generated(engine, wanted, then=redis_server.kill)
            assert redis_server.process is None
            assert killed.token_ids == expected.token_ids
            again = await generated(engine, wanted)
            assert again.token_ids == expected.token_ids
            assert again.steps < len(again.token_ids)

    within_a_minute(scenario)


def test_rds_01_requests_go_on_while_redis_is_down(tiny_model: Path, redis_server: Server) -> None:
    async def scenario() -> None:
        async with engine_on(tiny_model, redis_server.url) as engine:
            await generated(engine, request(engine, "before", "before"))
            redis_server.kill()
            for n in range(6):
                started = time.monotonic()
                opened = await engine.histories.open(Trajectory(f"new {n}", Scope("default", "tiny")), [1, 2, 3])
                assert time.monotonic() - started < 10 * DEADLINE_MS / 1000
                opened.close()
                on = await generated(engine, request(engine, f"down {n}", f"down {n}"))
                off = await generated(engine, request(engine, f"down {n}", f"off {n}", speculation=OFF))
                assert on.token_ids == off.token_ids
            assert engine.stats()["store_errors_total"] > 0
            assert engine.stats()["history_failures_total"] == 0

    within_a_minute(scenario)


def test_rds_07_a_restarted_redis_is_picked_up(tiny_model: Path, redis_server: Server) -> None:
    async def scenario() -> None:
        async with engine_on(tiny_model, redis_server.url) as engine, engine_on(tiny_model, redis_server.url) as other:
            await generated(engine, request(engine, "before", "before"))
            redis_server.kill()
            await generated(engine, request(engine, "while it is down", "down"))
            redis_server.start()

            async def stored() -> bool:
                name = f"after {time.monotonic()}"
                await generated(engine, request(engine, "tell me again", name))
                await engine.histories.flush()
                assert other.histories.store is not None
                found = await other.histories.store.load(Trajectory(name, Scope("default", "tiny")))
                return bool(found.size)

            await until(stored)
            assert engine.stats()["store_breaker_open"] == 0

    within_a_minute(scenario)


def test_sfx_04_a_second_engine_drafts_from_the_first_ones_run(tiny_model: Path, redis_server: Server) -> None:
    async def scenario() -> None:
        async with engine_on(tiny_model, redis_server.url) as first:
            wanted = request(first, "what was said", "shared", speculation=ONLY_TRAJECTORY)
            taught = await generated(first, wanted)
        async with engine_on(tiny_model, redis_server.url) as second:
            stranger = await generated(second, request(second, "what was said", "stranger", speculation=OFF))
            taken_over = await generated(second, wanted)
            assert taken_over.token_ids == taught.token_ids == stranger.token_ids
            assert taken_over.steps < taught.steps
            assert taken_over.accepted["trajectory"] > 0

    within_a_minute(scenario)


def test_a_new_engine_learns_what_its_scope_did(tiny_model: Path, redis_server: Server) -> None:
    async def scenario() -> None:
        async with engine_on(tiny_model, redis_server.url) as first:
            taught = await generated(first, request(first, "what was said", "one run"))
        async with engine_on(tiny_model, redis_server.url) as second:
            await generated(second, request(second, "hello", "warms the scope"))
            await second.histories.flush()
            learnt = await generated(second, request(second, "what was said", "another run"))
            assert learnt.token_ids == taught.token_ids
            assert learnt.steps < taught.steps
            assert learnt.accepted["scope"] > 0

    within_a_minute(scenario)
