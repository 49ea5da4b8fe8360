"""Load on a store: trajectories that grow turn by turn and are read, by one process of several.

Every token tells its trajectory and its position, so a wrong one is seen wherever it is read. Run as a program it works
until its standard input ends, and prints what happened as JSON.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.history import documents
from agentspec.cache.redis_store import RedisStore
from agentspec.config import CacheConfig
from agentspec.types import Scope, Trajectory

SCOPE = Scope("tenant", "model")
SPAN = 10_000_000
"""Tokens of trajectory n are n * SPAN and up."""

CLIENTS = 8


@dataclass
class Load:
    """What one process did and saw."""

    url: str
    number: int
    trajectories: int
    """Of all processes together; this one writes those from `number` on, in steps of two, and reads all."""

    turn_tokens: int
    deadline_ms: int
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    reads: int = 0
    found: int = 0
    slowest_ms: float = 0.0
    late: int = 0
    """Reads and writes that took more than the deadline and 50 ms."""

    stats: dict[str, float] = field(default_factory=dict)

    async def run(self, goes_on: Callable[[], bool], pause_s: float) -> None:
        """Work while that is wanted, then let the queue run empty."""
        config = CacheConfig(redis_url=self.url, deadline_ms=self.deadline_ms, trajectory_tokens=200_000)
        store = RedisStore(config)
        own = list(range(self.number, self.trajectories, 2))
        await asyncio.gather(
            *(
                self.client(store, own[client::CLIENTS], random.Random(client), goes_on, pause_s)
                for client in range(CLIENTS)
            )
        )
        for _ in range(100):
            await store.flush()
            if not len(store.outbox):
                break
        self.stats = dict(store.stats())
        await store.close()

    async def client(
        self, store: RedisStore, own: list[int], dice: random.Random, goes_on: Callable[[], bool], pause_s: float
    ) -> None:
        """Turns of some trajectories, one after the other."""
        while own and goes_on():
            for which in own:
                await self.turn(store, which, dice.randrange(self.trajectories))
                await asyncio.sleep(pause_s)

    async def turn(self, store: RedisStore, which: int, other: int) -> None:
        """Add a turn to a trajectory, and read another one."""
        start = which * SPAN + self.written.get(which, 0)
        began = time.monotonic()
        try:
            await store.append(Trajectory(f"run-{which}", SCOPE), np.arange(start, start + self.turn_tokens))
            self.written[which] = self.written.get(which, 0) + self.turn_tokens
            self.timed(began)
            began = time.monotonic()
            loaded = await store.load(Trajectory(f"run-{other}", SCOPE))
            self.timed(began)
            self.check(other, loaded)
        except Exception as error:
            self.failed.append(repr(error))
        self.stats = dict(store.stats())

    def timed(self, began: float) -> None:
        """Note how long a call took."""
        took = (time.monotonic() - began) * 1000
        self.slowest_ms = max(self.slowest_ms, took)
        self.late += took > self.deadline_ms + 50

    def check(self, which: int, loaded: Int32s) -> None:
        """Whatever was read must be stretches of that trajectory, each without a gap, none twice."""
        self.reads += 1
        self.found += loaded.size > 0
        parts = sorted((int(document[0]), int(document[-1])) for document in documents(loaded))
        if parts and not which * SPAN <= parts[0][0] <= parts[-1][1] < (which + 1) * SPAN:
            self.wrong.append(f"run-{which}: a token of another trajectory")
        if any(after[0] <= before[1] for before, after in pairwise(parts)):
            self.wrong.append(f"run-{which}: a token twice")
        if any((np.diff(document) != 1).any() for document in documents(loaded)):
            self.wrong.append(f"run-{which}: a gap without a boundary")


async def program(load: Load, pause_s: float) -> None:
    """Work until standard input ends."""
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    await load.run(lambda: not ended.done(), pause_s)
    print(json.dumps(asdict(load)))


if __name__ == "__main__":
    address, number, trajectories, turn_tokens, deadline_ms = sys.argv[1], *map(int, sys.argv[2:6])
    asyncio.run(program(Load(address, number, trajectories, turn_tokens, deadline_ms), float(sys.argv[6])))
