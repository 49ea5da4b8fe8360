"""The engine that `serve` and `replay` run in this process."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from agentspec.commands.models import pulled
from agentspec.config import Config


@contextlib.contextmanager
def loaded_engine(config: Config) -> Iterator[Any]:
    """The configured model's engine, pulled first if need be, with its histories' store; closed at the end."""
    pulled(config.model.name, config)
    from agentspec.cache.store import make_store  # type: ignore[import-not-found, unused-ignore]
    from agentspec.engine.service import Engine  # type: ignore[import-not-found, unused-ignore]

    engine = Engine.load(config, store=make_store(config.cache) if config.cache.redis_url else None)
    try:
        yield engine
    finally:
        asyncio.run(engine.close())
