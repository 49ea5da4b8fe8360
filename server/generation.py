"""Reading a generation for a client that may leave at any moment."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol, runtime_checkable

from starlette.types import Receive

from agentspec.errors import InternalError
from agentspec.server.metrics import Metrics
from agentspec.types import Delta


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


@runtime_checkable
class Closable(Protocol):
    """An iterator that can be stopped early."""

    async def aclose(self) -> None: ...


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone; to be called once the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Generation:
    """The deltas of one request, read one at a time; an async context that closes its source on every way out."""

    def __init__(self, source: AsyncIterator[Delta], receive: Receive, metrics: Metrics, started: float) -> None:
        self._source = source
        self._receive = receive
        self._metrics = metrics
        self._started: float | None = started
        """When the request came; None once the first token was seen."""

        self._pending: asyncio.Future[Delta] | None = None

    async def __aenter__(self) -> "Generation":
        self._gone = asyncio.ensure_future(disconnected(self._receive))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks: list[asyncio.Future[Any]] = [self._gone] if self._pending is None else [self._gone, self._pending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(self._source, Closable):
            await self._source.aclose()

    async def next(self, patience: float | None = None) -> Delta | None:
        """The next delta; None after `patience` seconds of silence, which loses nothing.

        Raises `ClientGone` as soon as the client has left, and what the worker raises.
        """
        if self._pending is None:
            self._pending = asyncio.ensure_future(anext(self._source))
        awaited: list[asyncio.Future[Any]] = [self._pending, self._gone]
        await asyncio.wait(awaited, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if self._gone.done():
            raise ClientGone
        if not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        return self._seen(delta_of(pending))

    def _seen(self, delta: Delta) -> Delta:
        if delta.tokens and self._started is not None:
            self._metrics.first_token(time.perf_counter() - self._started)
            self._started = None
        if delta.report is not None:
            self._metrics.finished(delta.report)
        return delta


def delta_of(done: asyncio.Future[Delta]) -> Delta:
    try:
        return done.result()
    except StopAsyncIteration:
        raise InternalError("the generation ended without a reason") from None
