"""A connection: what uvicorn's own leaves open to slow, half-closing and hostile clients."""

import asyncio
import socket
import sys
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from agentspec.config import ServerConfig
from agentspec.errors import AgentSpecError, HeadersTooLarge, InvalidRequest, RequestTimeout
from agentspec.server.answer import encode
from agentspec.server.failures import envelope

IDLE_CONNECTION_S = 75
"""An agent that runs a tool between two calls finds its connection still open."""

MAX_HEADER_BYTES = 64 * 1024
"""Most bytes of a request line with its headers, within `HEADER_PIECE_BYTES`."""

HEADER_PIECE_BYTES = 4096

PROBES_S = (0.2, 1.0, 2.0, 4.0, 8.0)
"""Seconds between interim answers to a client that has closed its side; few, as some clients take only a few."""


class Settings(uvicorn.Config):
    """uvicorn's settings for an application of ours."""

    def __init__(self, app: Starlette, config: ServerConfig) -> None:
        super().__init__(
            app,
            http=Connection,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            timeout_keep_alive=IDLE_CONNECTION_S,
            timeout_graceful_shutdown=config.shutdown_s,
        )
        self.receive_s = config.receive_s


class Connection(H11Protocol):
    """Ends connections whose client owes something for too long, and answers clients that have closed their side.

    Bodies that a route reads are timed by that route, since only it can answer.
    """

    def __init__(
        self,
        config: Settings,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._receive_s = config.receive_s
        self._clock: asyncio.TimerHandle | None = None
        self._half_closed = False
        self._probe: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Headers in pieces: h11 limits those that have not ended when it looks, however many come at once."""
        while data and not self.transport.is_closing():
            size = HEADER_PIECE_BYTES if self.conn.their_state is h11.IDLE else len(data)
            super().data_received(data[:size])
            data = data[size:]
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._clock, self._probe):
            if timer is not None:
                timer.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection of a client that has sent its request and may still read the answer.

        The end of what a client sends says not whether it has left: one that has resets the connection when it is
        sent something, so that an interim answer tells (RFC 9110, 15.2.1). HTTP/1.0 knows none, and counts as left.
        """
        if not self._answering() or self.scope["http_version"] == "1.0":
            return False
        if not self._half_closed:
            self._half_closed = True
            self._look_after_client(0)
        return True

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP; called while h11's own error is handled."""
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            self._refuse(HeadersTooLarge(f"the headers are larger than {MAX_HEADER_BYTES} bytes"))
        else:
            self._refuse(InvalidRequest("the request is not valid HTTP"))

    def _answering(self) -> bool:
        """Whether a request is complete and its answer is not."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _look_after_client(self, probes: int) -> None:
        """Drops a client that has left; else sends an interim answer, which one that has left will not take."""
        if self.transport.is_closing() or not self._answering():
            return
        connected = self.transport.get_extra_info("socket")
        if connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self.cycle.response_started and probes < len(PROBES_S):
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim))
        patience = PROBES_S[min(probes, len(PROBES_S) - 1)]
        self._probe = self.loop.call_later(patience, self._look_after_client, probes + 1)

    def _watch(self) -> None:
        """Runs the clock as long as the client owes something."""
        owing = self._receive_s > 0 and not self.transport.is_closing() and self._owing()
        if owing and self._clock is None:
            self._clock = self.loop.call_later(self._receive_s, self._too_slow)
        elif not owing and self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _owing(self) -> bool:
        """Whether headers are awaited, or the rest of a body that no route reads any more."""
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _too_slow(self) -> None:
        self._clock = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(RequestTimeout(f"the headers did not arrive within {self._receive_s:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: AgentSpecError) -> None:
        """Answers, if that is still possible, and closes."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encode(envelope(error))
            length = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
            head = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
