"""The engine that `serve` and `replay` run in this process."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from agentspec.commands.models import pulled
from agentspec.config import CacheConfig, Config


@contextlib.contextmanager
def loaded_engine(config: Config) -> Iterator[Any]:
    """The configured model's engine, pulled first if need be, with its histories' store; closed at the end."""
    pulled(config.model.name, config)
    from agentspec.engine.service import Engine  # type: ignore[import-not-found, unused-ignore]

    engine = Engine.load(config, store=shared_store(config.cache))
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def shared_store(config: CacheConfig) -> Any:
    """The store that processes share; None keeps histories in this process."""
    if not config.redis_url:
        return None
    from agentspec.cache.store import make_store  # type: ignore[import-not-found, attr-defined, unused-ignore]

    return make_store(config)
