"""Following a shared store: what other processes do in the scopes that are in use here."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from agentspec.cache.store import Changes, HistoryStore
from agentspec.types import Scope

POLL_S = 0.25
"""Time between two looks at a scope: a turn that another process finished is known here well within a second."""

IDLE_S = 60.0
"""A scope that nobody used for so long is not looked at until somebody does."""


class Follower:
    """Asks the store about scopes in turns. Belongs to one event loop.

    `begin` is called with a scope once the store has told the moment from which on `learn` will be told of changes.
    """

    def __init__(
        self,
        store: HistoryStore,
        begin: Callable[[Scope], Awaitable[None]],
        learn: Callable[[Scope, Changes], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.begin = begin
        self.learn = learn
        self.clock = clock
        self.since: dict[Scope, str] = {}
        self.used: dict[Scope, float] = {}
        self.asked: dict[Scope, asyncio.Lock] = {}
        self.task: asyncio.Task[None] | None = None

    def use(self, scope: Scope) -> None:
        """A scope is in use."""
        self.used[scope] = self.clock()
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self.run())

    async def run(self) -> None:
        """Look at every scope in use, until there is none."""
        while True:
            await asyncio.sleep(POLL_S)
            for scope in [scope for scope, used in self.used.items() if used + IDLE_S < self.clock()]:
                del self.used[scope]
            if not self.used:
                return
            await asyncio.gather(*(self.look(scope) for scope in list(self.used)))

    async def look(self, scope: Scope) -> None:
        """Take in what happened in a scope since the last look."""
        async with self.asked.setdefault(scope, asyncio.Lock()):
            since = self.since.get(scope, "")
            changes = await self.store.changes(scope, since)
            if changes is None:
                return
            self.since[scope] = changes.now
            if since:
                await self.learn(scope, changes)
            else:
                await self.begin(scope)

    def leave(self, scope: Scope) -> None:
        """A scope's history is no longer in this process."""
        self.since.pop(scope, None)
        self.used.pop(scope, None)
        self.asked.pop(scope, None)

    async def close(self) -> None:
        """Look no more."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
