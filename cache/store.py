"""Where histories outlive the process: the protocol of a store, and the one in memory."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.history import BOUNDARY
from agentspec.cache.index import Tokens
from agentspec.config import LARGEST, CacheConfig
from agentspec.errors import ConfigError
from agentspec.types import Scope, Trajectory

ENTRY_BYTES = 512
"""Memory of a stored trajectory beside its tokens, about."""

LOOKS = 1000
"""How often in a lifetime memory is looked through for what is too old."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored of a trajectory."""

    tokens: int
    turns: int
    bytes: int
    updated: float
    """When it was written last, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened in a scope since a moment."""

    now: str
    """The moment, to be given to the next call."""

    written: tuple[str, ...] = ()
    """Ids of trajectories that were written, newest first."""

    deleted: frozenset[str] = frozenset()
    """Digests of trajectories that were deleted."""


class HistoryStore(Protocol):
    """Keeps the tokens of trajectories. No method raises: what cannot be read is absent, and `stats` counts it."""

    @property
    def reserved_bytes(self) -> int:
        """Memory of this process that the store may take."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other processes write to it too."""
        ...

    async def append(self, trajectory: Trajectory, tokens: Tokens) -> None:
        """Add tokens to the end of a trajectory; returns before they are stored."""
        ...

    async def load(self, trajectory: Trajectory) -> Int32s:
        """The tokens of a trajectory, the oldest perhaps missing; empty when there are none."""
        ...

    async def news(self, trajectory: Trajectory) -> Int32s:
        """What other processes added to a trajectory since it was read last."""
        ...

    async def recent(self, scope: Scope, limit: int) -> list[str]:
        """Ids of the trajectories of a scope that were written last, newest first."""
        ...

    async def changes(self, scope: Scope, since: str) -> Changes | None:
        """What other processes did in a scope since a moment, empty for now; None when that is not to be had."""
        ...

    async def describe(self, trajectory: Trajectory) -> Stored | None:
        """What is stored of a trajectory; None where nothing is, or it does not come in time."""
        ...

    async def delete(self, trajectory: Trajectory) -> bool | None:
        """Delete a trajectory: whether there was one; None when that is not done in time, and goes on."""
        ...

    def disown(self, trajectory: Trajectory) -> None:
        """Another process deleted a trajectory: nothing that waits is added to it."""
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory in memory."""

    updated: float
    turns: int = 0
    tokens: Int32s = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return ENTRY_BYTES + self.tokens.nbytes


class MemoryStore:
    """Keeps trajectories in this process within numbers of bytes; the least recently written leave first."""

    shared = False

    def __init__(
        self,
        max_bytes: int,
        trajectory_tokens: int,
        *,
        scope_bytes: int = LARGEST,
        ttl_s: int = LARGEST,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.reserved_bytes = max_bytes
        self.trajectory_tokens = trajectory_tokens
        self.scope_bytes = scope_bytes
        self.ttl_s = ttl_s
        self.clock = clock
        self.kept: OrderedDict[tuple[Scope, str], Entry] = OrderedDict()
        """Least recently written first."""

        self.bytes = 0
        self.bytes_of: Counter[Scope] = Counter()
        self.latest = 0.0
        """The latest date of all; a clock before it was set back."""

        self.look_at = 0.0
        """Nothing is too old before then, unless the clock is set back."""

        self.evictions = 0
        self.refused = 0

    async def append(self, trajectory: Trajectory, tokens: Tokens) -> None:
        """Add tokens to the end of a trajectory, and forget its oldest beyond the limit."""
        self.add(trajectory, tokens)

    def add(self, trajectory: Trajectory, tokens: Tokens) -> Int32s:
        """Append tokens of a turn; those that were taken."""
        try:
            new = np.asarray(tokens, np.int32).reshape(-1)
            if new.min(initial=0) < BOUNDARY:
                raise ValueError("a token is negative")
        except (OverflowError, TypeError, ValueError):
            self.refused += 1
            return np.empty(0, np.int32)
        if new.size:
            self.extend(trajectory, new, 1, self.clock())
            self.make_room(trajectory.scope)
        return new

    def extend(self, trajectory: Trajectory, tokens: Int32s, turns: int, updated: float) -> None:
        """Append tokens of so many turns, whatever room there is."""
        old = self.take(trajectory) or Entry(updated)
        both = np.concatenate((old.tokens, tokens))[-self.trajectory_tokens :]
        entry = Entry(updated, old.turns + turns, both.copy())
        self.kept[trajectory.scope, trajectory.id] = entry
        self.bytes += entry.bytes
        self.bytes_of[trajectory.scope] += entry.bytes
        self.latest = max(self.latest, updated)
        self.look_at = min(self.look_at, updated + self.ttl_s)

    def take(self, trajectory: Trajectory) -> Entry | None:
        """Keep a trajectory no longer."""
        entry = self.kept.pop((trajectory.scope, trajectory.id), None)
        if entry is not None:
            self.bytes -= entry.bytes
            self.bytes_of[trajectory.scope] -= entry.bytes
            if not self.bytes_of[trajectory.scope]:
                del self.bytes_of[trajectory.scope]
        return entry

    def make_room(self, scope: Scope) -> None:
        """Let those leave that are too old, then the least recently written, as the limits of bytes say."""
        if not self.latest <= self.clock() <= self.look_at:
            self.look_through()
        while self.bytes_of[scope] > self.scope_bytes:
            self.evict(next(Trajectory(name, scope) for owner, name in self.kept if owner == scope))
        while self.kept and self.bytes > self.reserved_bytes:
            owner, name = next(iter(self.kept))
            self.evict(Trajectory(name, owner))

    def look_through(self) -> None:
        """Let those leave that are too old. A date in the future, which a clock had that was set back, becomes now."""
        now = self.clock()
        for (scope, name), entry in list(self.kept.items()):
            if entry.updated > now:
                self.kept[scope, name] = replace(entry, updated=now)
            elif self.expired(entry):
                self.evict(Trajectory(name, scope))
        self.latest = now
        first = min((entry.updated for entry in self.kept.values()), default=now)
        self.look_at = max(first + self.ttl_s, now + self.ttl_s / LOOKS)

    def evict(self, trajectory: Trajectory) -> None:
        """A trajectory leaves to make room."""
        self.take(trajectory)
        self.evictions += 1

    def expired(self, entry: Entry) -> bool:
        """Whether a trajectory was written too long ago."""
        return entry.updated + self.ttl_s < self.clock()

    def find(self, trajectory: Trajectory) -> Entry | None:
        """A trajectory that is kept."""
        entry = self.kept.get((trajectory.scope, trajectory.id))
        return None if entry is None or self.expired(entry) else entry

    async def load(self, trajectory: Trajectory) -> Int32s:
        """The tokens of a trajectory."""
        entry = self.find(trajectory)
        return np.empty(0, np.int32) if entry is None else entry.tokens.copy()

    async def news(self, trajectory: Trajectory) -> Int32s:
        """Nobody else adds anything."""
        return np.empty(0, np.int32)

    async def recent(self, scope: Scope, limit: int) -> list[str]:
        """Ids of a scope, newest first."""
        known = ((key, owner) for (owner, key), entry in reversed(self.kept.items()) if not self.expired(entry))
        return [key for key, owner in known if owner == scope][: max(limit, 0)]

    async def changes(self, scope: Scope, since: str) -> Changes | None:
        """Nobody else changes anything."""
        return None

    async def describe(self, trajectory: Trajectory) -> Stored | None:
        """What is kept of a trajectory."""
        entry = self.find(trajectory)
        return None if entry is None else Stored(entry.tokens.size, entry.turns, entry.bytes, entry.updated)

    async def delete(self, trajectory: Trajectory) -> bool | None:
        """Forget a trajectory."""
        return self.take(trajectory) is not None

    def disown(self, trajectory: Trajectory) -> None:
        """Nobody else deletes anything."""

    async def flush(self) -> None:
        """Every call takes effect at once."""

    async def close(self) -> None:
        """Forget everything."""
        self.kept.clear()
        self.bytes_of.clear()
        self.bytes = 0

    def stats(self) -> Mapping[str, float]:
        """Bytes and trajectories held, and how many left."""
        return {
            "store_bytes": self.bytes,
            "store_trajectories": len(self.kept),
            "store_evictions_total": self.evictions,
            "store_refused_total": self.refused,
        }


def make_store(config: CacheConfig) -> HistoryStore | None:
    """The store that the settings ask for, None for none beside the histories in this process.

    Connects to no Redis yet; opens and locks a file. Raises `ConfigError` that names the setting at fault.
    """
    if config.redis_url and config.history_file:
        raise ConfigError("AGENTSPEC_CACHE_REDIS_URL and AGENTSPEC_CACHE_HISTORY_FILE are both set; choose one")
    if config.history_file:
        from agentspec.cache.file_store import FileStore

        return FileStore(config)
    if not config.redis_url:
        return None
    from agentspec.cache.redis_store import RedisStore

    return RedisStore(config)
