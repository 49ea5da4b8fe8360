"""All that a store holds, for commands: trajectory by trajectory, with what is wrong with each.

Unlike `HistoryStore` it waits, changes nothing, and raises `StoreError` for what it cannot read.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from redis.exceptions import RedisError

from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import Keys, join, named_by, newer, unpack
from agentspec.cache.journal import SETTING, Found, check_kind, encode, file_at, read
from agentspec.config import CacheConfig
from agentspec.errors import ConfigError, StoreError
from agentspec.types import Trajectory


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored trajectory."""

    trajectory: Trajectory
    tokens: Int32s
    turns: int
    updated: float
    bytes: int
    """Of its chunks in a Redis, of its records in a file."""

    problems: tuple[str, ...] = ()
    newer: bool = False
    """A later version wrote it; its tokens are not read."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What was found in a store."""

    place: str
    kept: list[Kept]
    problems: list[str]
    """What is wrong with the store, beside what is wrong with a trajectory."""


def configured(config: CacheConfig) -> None:
    """Raises `ConfigError` unless one store is configured."""
    if config.redis_url and config.history_file:
        raise ConfigError(f"AGENTSPEC_CACHE_REDIS_URL and {SETTING} are both set; choose one")
    if not config.redis_url and not config.history_file:
        raise ConfigError("no store is configured: give --redis-url or --history-file")


async def inventory(config: CacheConfig) -> Inventory:
    """All that the configured store holds. Raises `ConfigError` where none is configured, `StoreError` for one that
    cannot be read."""
    configured(config)
    if config.history_file:
        return of_file(file_at(config.history_file))
    found = [kept async for kept in of_redis(config)]
    return Inventory("redis", found, [])


def of_file(path: Path) -> Inventory:
    """What a file holds; another process may write to it meanwhile."""
    try:
        check_kind(path)
        found = read(path.read_bytes())
    except ValueError:
        raise StoreError(f"{path} is no file of histories") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    problems = []
    if not found.whole:
        what = "ends in a write that was interrupted" if found.torn else "is damaged"
        problems.append(f"{what} at byte {found.end} of {found.size}")
    return Inventory(str(path), list(grouped(found)), problems)


def grouped(found: Found) -> Iterator[Kept]:
    """The trajectories of a file's records, in the order of their last write."""
    parts: dict[Trajectory, list[Any]] = {}
    for record in found.records:
        records = parts.pop(record.trajectory, [])
        parts[record.trajectory] = [*records, record]
    for trajectory, records in parts.items():
        tokens = np.concatenate([record.tokens for record in records])
        turns = sum(record.turns for record in records)
        size = sum(len(encode(trajectory, one.tokens, one.turns, one.updated)) for one in records)
        yield Kept(trajectory, tokens, turns, records[-1].updated, size)


async def of_redis(config: CacheConfig) -> AsyncIterator[Kept]:
    """What a Redis holds, while others may write to it."""
    from agentspec.cache.redis_client import connect

    client: Any = connect(config, 4)
    try:
        async for key in client.scan_iter(match="as:{*}:tok", count=1000):
            trajectory = named_by(key.decode("utf-8", "surrogateescape"))
            if trajectory is not None:
                kept = await in_redis(client, trajectory)
                if kept is not None:
                    yield kept
    except (RedisError, OSError, TimeoutError) as error:
        raise StoreError(f"cannot read the Redis of AGENTSPEC_CACHE_REDIS_URL: {error}") from None
    finally:
        await client.aclose()


async def in_redis(client: Any, trajectory: Trajectory) -> Kept | None:
    """What a Redis holds of a trajectory; None where it went meanwhile."""
    keys = Keys.of(trajectory)
    if await client.type(keys.tokens) != b"list":
        return Kept(trajectory, np.empty(0, np.int32), 0, 0.0, 0, ("is no list",))
    stored = await client.lrange(keys.tokens, 0, -1)
    turns, updated = await client.hmget(keys.meta, ["turns", "updated"])
    lifetimes = [await client.ttl(key) for key in (keys.tokens, keys.meta)]
    if not stored:
        return None
    chunks = [unpack(trajectory, data) for data in stored]
    of_later = any(newer(data) for data in stored)
    damaged = sum(chunk is None and not newer(data) for chunk, data in zip(chunks, stored, strict=True))
    problems = [f"{damaged} of {len(stored)} chunks are damaged"] if damaged else []
    problems += ["never expires"] if -1 in lifetimes else []
    tokens = join(chunk for chunk in chunks if chunk is not None)
    size = sum(len(data) for data in stored)
    return Kept(trajectory, tokens, int(turns or 0), float(updated or 0), size, tuple(problems), of_later)
