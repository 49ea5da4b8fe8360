"""The one place where an exception becomes an answer."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentspec.errors import (
    AgentSpecError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestTimeout,
    Unavailable,
)
from agentspec.server.answer import encode, event
from agentspec.server.generation import ClientGone

log = logging.getLogger(__name__)


class Failures:
    """Answers every exception with the error envelope: a status before the headers, a last event after them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        progress = Progress(send)
        try:
            await self._app(scope, receive, progress.send)
        except (ClientGone, ClientDisconnect):
            raise ClientGone from None
        except asyncio.CancelledError:
            # Only a server that stops cancels requests; passed on, it would log each of them with a traceback.
            await progress.fail(Unavailable("the server is stopping"))
        except Exception as error:
            await progress.fail(named(error))


class Progress:
    """How far the answer to one request has got."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self._streaming = False
        self._complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._streaming = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
        else:
            self._complete = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, error: AgentSpecError) -> None:
        """Sends the error in the way that is still open."""
        if not self._started:
            await error_response(error)({"type": "http"}, no_request, self._send)
        elif self._streaming and not self._complete:
            await self._send({"type": "http.response.body", "body": event(envelope(error)), "more_body": False})


async def no_request() -> Message:
    """An error is answered without reading the request."""
    return {"type": "http.disconnect"}


def named(error: Exception) -> AgentSpecError:
    """The named error to tell the client; what was not raised on purpose is logged and told nothing of."""
    if isinstance(error, AgentSpecError):
        return error
    log.error("a request failed", exc_info=error)
    return InternalError("the server failed to answer this request")


def envelope(error: AgentSpecError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: AgentSpecError, headers: Mapping[str, str] | None = None) -> Response:
    found = dict(headers or {})
    if error.retry_after is not None:
        found["retry-after"] = str(error.retry_after)
    if isinstance(error, RequestTimeout):
        found["connection"] = "close"
    return Response(encode(envelope(error)), error.status, found, "application/json")


def routing_error(method: str, path: str, error: HTTPException) -> AgentSpecError:
    """The named form of what the router raises."""
    if error.status_code == 404:
        return NotFound(f"there is no {path!r:.200}")
    if error.status_code == 405:
        return MethodNotAllowed(f"{method!r:.20} is not allowed here")
    return InvalidRequest(str(error.detail))
