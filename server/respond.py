"""The two ways an answer is sent. Nothing is sent before the worker has given its first sign of life."""

import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentspec.server.answer import Answer, encode, event
from agentspec.server.generation import Generation

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class WholeAnswer(Response):
    """Collects a generation and sends it as one JSON object."""

    media_type = "application/json"

    def __init__(self, generation: Generation, answer: Answer) -> None:
        self._generation = generation
        self._answer = answer
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            while not self._answer.complete:
                delta = await generation.next()
                if delta is not None:
                    self._answer.add(delta)
        body = encode(self._answer.whole())
        headers = {"x-agentspec-trajectory": self._answer.frame.trajectory.id}
        await Response(body, headers=headers, media_type=self.media_type)(scope, receive, send)


class EventStream(Response):
    """Sends a generation as server-sent events while it grows."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, keepalive_s: float) -> None:
        self._generation = generation
        self._answer = answer
        self._patience = keepalive_s or None
        self._sent = float("-inf")
        """When bytes were sent last."""

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**headers, "x-agentspec-trajectory": answer.frame.trajectory.id})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            delta = await generation.next(self._patience)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while delta is None:
                await self._send(send, b"")
                delta = await generation.next(self._patience)
            self._sent = time.monotonic()
            await self._send(send, events(self._answer.opening()))
            while True:
                sent = events(self._answer.chunks(delta)) if delta else b""
                if self._answer.complete:
                    break
                await self._send(send, sent)
                delta = await generation.next(self._patience)
            await self._send(send, sent + DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, sent: bytes) -> None:
        """Sends events, or a comment when there are none and the last bytes are long ago."""
        now = time.monotonic()
        if not sent and (self._patience is None or now - self._sent < self._patience):
            return
        self._sent = now
        await send({"type": "http.response.body", "body": sent or KEEP_ALIVE, "more_body": True})


def events(chunks: Sequence[Any]) -> bytes:
    return b"".join(event(chunk) for chunk in chunks)
