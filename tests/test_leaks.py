"""Hundreds of requests, most of them left half-way: nothing of them stays but what is kept on purpose, in bounds."""

import asyncio
import gc
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.cache.history import Conversation
from agentspec.cache.retrieval import Histories
from agentspec.cache.session import HistorySession
from agentspec.config import CacheConfig, Config, EngineConfig, ModelConfig, ServerConfig
from agentspec.engine.job import Job
from agentspec.engine.kv import Page, PageTable
from agentspec.engine.prefix import Holding, Node
from agentspec.engine.service import Engine
from agentspec.policies.cost import FixedCost
from agentspec.server.generation import Generation
from agentspec.server.run import serve_in_thread

CHAT = "/v1/chat/completions"
OF_A_REQUEST = (Job, Holding, PageTable, HistorySession, Generation, asyncio.Task, asyncio.Queue)
"""Gone with their request."""

KEPT = (Page, Node, Conversation)
"""Kept for later requests, within limits that are small here."""

CACHE = CacheConfig(memory_bytes=400_000, trajectory_tokens=2_000, scope_tokens=4_000)


def live(*kinds: type) -> Counter[str]:
    """Objects by class, after a collection."""
    gc.collect()
    return Counter(type(found).__name__ for found in gc.get_objects() if type(found) in kinds)


async def one(client: httpx.AsyncClient, chance: random.Random, number: int) -> None:
    """A request of some run, with a random ending: whole, streamed to its end, or left at a random event."""
    texts = [chance.choice(["read a file", "tell me", "list it", "again"]) for _ in range(chance.choice((1, 3)))]
    roles = ("user", "assistant")
    body: dict[str, Any] = {
        "messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)],
        "max_tokens": chance.choice((2, 20, 60)),
        "temperature": chance.choice((0, 1)),
        "stream": chance.random() < 0.8,
        "speculation": {"enabled": chance.random() < 0.8},
    }
    headers = {"X-AgentSpec-Trajectory": f"run-{number % 37}"}
    patience = chance.choice((0.002, 0.02, 30, 30))
    with_lines = chance.choice((0, 1, 5, 10_000))
    try:
        async with client.stream("POST", CHAT, json=body, headers=headers, timeout=patience) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            for _ in range(with_lines):
                if await anext(lines, None) is None:
                    break
    except httpx.TimeoutException:
        pass


async def many(url: str, seed: int, count: int) -> None:
    """Requests of eight clients at a time."""
    chance = random.Random(seed)
    room = asyncio.Semaphore(8)

    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as client:

        async def admitted(number: int) -> None:
            async with room:
                await one(client, random.Random(chance.random()), number)

        await asyncio.gather(*(admitted(number) for number in range(count)))


def settle(engine: Engine) -> None:
    """Wait until the server has noticed that everybody has left."""
    deadline = time.monotonic() + 20
    while any(engine.stats()[name] for name in ("running_requests", "waiting_requests", "history_sessions")):
        assert time.monotonic() < deadline, engine.stats()
        time.sleep(0.02)
    time.sleep(0.2)


@pytest.mark.slow
def test_requests_that_are_left_half_way_leave_nothing_behind(tiny_model: Path) -> None:
    config = Config(
        model=ModelConfig(name=str(tiny_model)), engine=EngineConfig(max_running=3, kv_bytes=2_000_000), cache=CACHE
    )
    engine = Engine.from_folder(config, tiny_model, Histories(CACHE))
    engine.loop.cost = FixedCost()
    rounds = []
    with serve_in_thread(engine, ServerConfig()) as url:
        for seed in range(4):
            asyncio.run(many(url, seed, 120))
            settle(engine)
            pool, stats = engine.loop.pool, engine.stats()
            assert pool.running == []
            assert pool.pages <= pool.limit
            assert stats["history_bytes"] <= CACHE.memory_bytes
            counts = live(*OF_A_REQUEST, *KEPT)
            assert counts["Page"] == pool.pages == counts["Node"] - len(pool.roots)
            assert not any(counts[name] for name in ("Job", "Holding", "PageTable", "HistorySession", "Generation"))
            rounds.append(counts)
    assert rounds[-1]["Task"] <= rounds[0]["Task"]
    assert rounds[-1]["Queue"] <= rounds[0]["Queue"]
    assert live(*OF_A_REQUEST)["Job"] == 0
