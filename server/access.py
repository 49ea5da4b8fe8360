"""Counts and logs each request; the log never holds a word of a prompt."""

import logging
import time
from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentspec.server.generation import ClientGone
from agentspec.server.metrics import Metrics

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status in logs and metrics when the client left before the end; never sent."""


class Access:
    """Outermost layer: sees the status that was really sent."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[Route]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope["agentspec.started"] = started = time.perf_counter()
        self._metrics.request_began()
        try:
            await self._app(scope, receive, noting)
        except ClientGone:
            status = CLIENT_GONE
        finally:
            seconds = time.perf_counter() - started
            self._metrics.request_ended(self._route(scope["path"]), status, seconds)
            log.info("%s %.200r %d %.0f ms", scope["method"], scope["path"], status, seconds * 1000)

    def _route(self, path: str) -> str:
        """The path of ours that it is, with `{id}` for an id, so that clients cannot invent label values."""
        return next((route.path_format for route in self._routes if route.path_regex.match(path)), "other")
