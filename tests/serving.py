"""Engines on the tiny model, and applications in front of them, for as long as a scenario takes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig, Config, EngineConfig, ModelConfig, ServerConfig
from agentspec.engine.service import Engine
from agentspec.policies.cost import FixedCost
from agentspec.server.app import create_app

HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
"""A client for servers on sockets; it waits while a first request compiles."""

EngineScenario = Callable[[Engine], Awaitable[None]]
Scenario = Callable[[httpx.AsyncClient, Engine], Awaitable[None]]


def engine_on(folder: Path, window: int = 0, **settings: Any) -> Engine:
    """An engine that drafts whenever it can, whatever a pass costs on this machine."""
    config = Config(model=ModelConfig(name=str(folder), window=window), engine=EngineConfig(**settings))
    engine = Engine.from_folder(config, folder, Histories(CacheConfig()))
    engine.loop.cost = FixedCost()
    return engine


def with_engine(folder: Path, scenario: EngineScenario, window: int = 0, **settings: Any) -> None:
    """A scenario against a fresh engine."""

    async def body() -> None:
        engine = engine_on(folder, window, **settings)
        try:
            await asyncio.wait_for(scenario(engine), 60)
        finally:
            await engine.close()

    asyncio.run(body())


def in_process(folder: Path, scenario: Scenario, config: ServerConfig | None = None, **settings: Any) -> None:
    """A scenario against a fresh application, without a socket."""

    async def asked(engine: Engine) -> None:
        transport = httpx.ASGITransport(create_app(engine, config or ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await scenario(client, engine)

    with_engine(folder, asked, **settings)
