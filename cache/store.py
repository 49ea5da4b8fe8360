"""Where histories outlive the process: the protocol of a store, and the one in memory."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.index import Tokens
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory


class HistoryStore(Protocol):
    """Keeps the tokens of trajectories. No method raises: what cannot be read is absent, and `stats` counts it."""

    @property
    def reserved_bytes(self) -> int:
        """Memory of this process that the store may take."""
        ...

    async def append(self, trajectory: Trajectory, tokens: Tokens) -> None:
        """Add tokens to the end of a trajectory; returns before they are stored."""
        ...

    async def load(self, trajectory: Trajectory) -> Int32s:
        """The tokens of a trajectory, the oldest perhaps missing; empty when there are none."""
        ...

    async def recent(self, scope: Scope, limit: int) -> list[str]:
        """Ids of the trajectories of a scope that were written last, newest first."""
        ...

    async def delete(self, trajectory: Trajectory) -> None:
        """Forget a trajectory; returns before it is gone."""
        ...

    async def flush(self) -> None:
        """Wait until earlier calls took effect, but not for long."""
        ...

    async def close(self) -> None:
        """Store what waits, as far as that goes quickly, and let go of the connection."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges by metric name; all names start with `store_`."""
        ...


class MemoryStore:
    """Keeps trajectories in this process within a number of bytes; the least recently written leave first."""

    def __init__(self, max_bytes: int, trajectory_tokens: int) -> None:
        self.reserved_bytes = max_bytes
        self.trajectory_tokens = trajectory_tokens
        self.kept: OrderedDict[tuple[Scope, str], Int32s] = OrderedDict()
        self.bytes = 0
        self.evictions = 0
        self.refused = 0

    async def append(self, trajectory: Trajectory, tokens: Tokens) -> None:
        """Add tokens to the end of a trajectory, and forget its oldest beyond the limit."""
        try:
            new = np.asarray(tokens, np.int32).reshape(-1)
        except (OverflowError, TypeError, ValueError):
            self.refused += 1
            return
        if not new.size:
            return
        key = (trajectory.scope, trajectory.id)
        old = self.kept.pop(key, np.empty(0, np.int32))
        both = np.concatenate((old, new))[-self.trajectory_tokens :]
        self.kept[key] = both.copy()
        self.bytes += both.nbytes - old.nbytes
        while self.bytes > self.reserved_bytes:
            _, evicted = self.kept.popitem(last=False)
            self.bytes -= evicted.nbytes
            self.evictions += 1

    async def load(self, trajectory: Trajectory) -> Int32s:
        """The tokens of a trajectory."""
        return self.kept.get((trajectory.scope, trajectory.id), np.empty(0, np.int32)).copy()

    async def recent(self, scope: Scope, limit: int) -> list[str]:
        """Ids of a scope, newest first."""
        return [key for owner, key in reversed(self.kept) if owner == scope][: max(limit, 0)]

    async def delete(self, trajectory: Trajectory) -> None:
        """Forget a trajectory."""
        forgotten = self.kept.pop((trajectory.scope, trajectory.id), None)
        self.bytes -= forgotten.nbytes if forgotten is not None else 0

    async def flush(self) -> None:
        """Every call takes effect at once."""

    async def close(self) -> None:
        """Forget everything."""
        self.kept.clear()
        self.bytes = 0

    def stats(self) -> Mapping[str, float]:
        """Bytes and trajectories held, and how many left."""
        return {
            "store_bytes": self.bytes,
            "store_trajectories": len(self.kept),
            "store_evictions_total": self.evictions,
            "store_refused_total": self.refused,
        }


def make_store(config: CacheConfig) -> HistoryStore:
    """The store that the settings ask for; connects to nothing yet."""
    if not config.redis_url:
        return MemoryStore(config.memory_bytes // 8, config.trajectory_tokens)
    from agentspec.cache.redis_store import RedisStore

    return RedisStore(config)
