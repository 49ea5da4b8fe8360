"""Calls to Redis that never raise: a deadline for those that somebody waits for, a breaker for each server."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis

from agentspec.cache.breaker import Breaker
from agentspec.cache.redis_client import Client, node_of, script

logger = logging.getLogger(__name__)

READERS = 16
"""Reads at a time; further ones are skipped."""

WRITE_S = 5.0
"""Longest a write may take, and a read for which nobody waits any more."""

CLOSE_S = 1.0
"""Wait for each of the writers' and the client's ends. A client waits until all that it wrote has left, which a Redis
that does not read never lets happen."""


class Calls:
    """One client, what it is asked, and how that went. Belongs to one event loop."""

    def __init__(self, client: Client, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self.deadline_s = deadline_s
        self.clock = clock
        self.breakers: dict[tuple[str, str], Breaker] = {}
        self.reads: set[asyncio.Task[Any]] = set()
        self.starting: asyncio.Task[Any] | None = None
        self.closed = False
        self.counts = dict.fromkeys(("errors", "skipped", "busy"), 0)

    def lane(self, key: str) -> str:
        """Name of the server of a key."""
        return node_of(self.client, key)

    def breaker(self, kind: str, lane: str) -> Breaker:
        """The breaker of the reads or the writes of a server: one that is slow or full closes no other way."""
        return self.breakers.setdefault((kind, lane), Breaker(self.clock))

    @property
    def open(self) -> bool:
        """Whether the last calls of some kind failed."""
        return any(breaker.open for breaker in self.breakers.values())

    async def eval(self, name: str, keys: Sequence[str], *arguments: Any) -> Any:
        """What a Lua script answers, in one round trip."""
        await self.started()
        return await self.client.eval(script(name), len(keys), *keys, *arguments)

    async def started(self) -> None:
        """Sees that a cluster's map is known; whoever no longer waits for it does not stop it."""
        if isinstance(self.client, Redis):
            return
        if self.starting is None or self.starting.done():
            self.starting = asyncio.ensure_future(self.client.initialize())
            self.starting.add_done_callback(seen)
        await asyncio.shield(self.starting)

    async def read(self, key: str, operation: Callable[[], Awaitable[Any]]) -> Any:
        """The answer about a key within the deadline, else None.

        A late one still arrives, and leaves its connection ready for the next read.
        """
        if len(self.reads) >= READERS:
            self.counts["busy"] += 1
            return None
        breaker = self.breaker("read", self.lane(key))
        if self.closed or not breaker.allows():
            self.counts["skipped"] += 1
            return None
        task = asyncio.ensure_future(limited(operation))
        self.reads.add(task)
        task.add_done_callback(self.reads.discard)
        task.add_done_callback(seen)
        await asyncio.wait([task], timeout=self.deadline_s)
        if task.done() and not task.cancelled() and task.exception() is None:
            breaker.succeeded()
            return task.result()
        late = not task.done() or task.cancelled()
        self.failed(breaker, f"nothing in {self.deadline_s * 1000:g} ms" if late else task.exception())
        return None

    async def write(self, lane: str, operation: Callable[[], Awaitable[Any]]) -> Any:
        """The answer of a server, which may take its time; None where there is none."""
        breaker = self.breaker("write", lane)
        if self.closed or not breaker.allows():
            self.counts["skipped"] += 1
            return None
        try:
            answer = await limited(operation)
        except Exception as error:
            self.failed(breaker, error)
            return None
        breaker.succeeded()
        return answer

    def failed(self, breaker: Breaker, why: object) -> None:
        """Count a failure, and say so."""
        self.counts["errors"] += 1
        breaker.failed()
        text = str(why) or type(why).__name__
        if text.startswith("MOVED"):
            text += "; for a cluster the URL begins with redis+cluster:// or rediss+cluster://"
        logger.warning("the history store did not answer: %.300s", text)

    async def alive(self, lane: str) -> bool:
        """Whether a server answers at all."""
        try:
            if isinstance(self.client, Redis):
                return bool(await limited(self.client.ping))
            node = self.client.get_node(node_name=lane)
            return node is not None and bool(await limited(lambda: node.execute_command("PING")))
        except Exception:
            return False

    async def close(self) -> None:
        """End reads that nobody waits for, and disconnect; a Redis that hangs holds it up for a second or two."""
        self.closed = True
        for task in [*self.reads, *([self.starting] if self.starting is not None else [])]:
            await ended(task, 0)
        await ended(asyncio.ensure_future(self.client.aclose()), CLOSE_S)


async def limited(operation: Callable[[], Awaitable[Any]]) -> Any:
    """An operation's answer within the time that any call may take."""
    async with asyncio.timeout(WRITE_S):
        return await operation()


def seen(task: asyncio.Future[Any]) -> None:
    """Nobody may be waiting for the task: its error is known."""
    if not task.cancelled():
        task.exception()


async def ended(task: asyncio.Future[Any], patience_s: float) -> None:
    """Wait for a task, cancel it when that takes too long, and give it up when it does not end then either."""
    if patience_s:
        await asyncio.wait([task], timeout=patience_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_S)
    if not task.done():
        logger.warning("the history store did not close in time")
    elif not task.cancelled() and task.exception() is not None:
        logger.warning("the history store did not close well: %s", task.exception())
