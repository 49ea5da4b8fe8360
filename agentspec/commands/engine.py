"""The engine that `serve` and `replay` run in this process."""

import os
from typing import TYPE_CHECKING

from agentspec.commands.models import pulled
from agentspec.config import Config

if TYPE_CHECKING:
    from agentspec.engine.service import Engine


SPINS = "10000"
"""Turns that an idle OpenMP thread spins before it sleeps.

The library's own default spins for milliseconds, which costs 10 times the speed when an agent's tools, or anything
else, run on the same cores.
"""


def limit_spinning() -> None:
    """Set OpenMP's spinning unless the user did. To be called before torch is imported: it reads this once."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def ready_device(config: Config) -> None:
    """Before anything is fetched or loaded: raises `ConfigError` for a device that is not there."""
    limit_spinning()
    from agentspec.engine.placement import chosen_device

    chosen_device(config)


def loaded_engine(config: Config) -> "Engine":
    """The configured model's engine, pulled first if need be, with its histories' store; the server closes it."""
    ready_device(config)
    from agentspec.cache.store import make_store

    store = make_store(config.cache)
    pulled(config.model.name, config)
    from agentspec.engine.service import Engine

    return Engine.load(config, store=store)
