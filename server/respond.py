"""The two ways a completion is sent. Nothing is sent before the worker has given its first sign of life."""

import time
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentspec.errors import InternalError
from agentspec.server.answer import Answer, encode, event
from agentspec.server.generation import Generation
from agentspec.server.tools import Call, ToolParser
from agentspec.types import Delta, FinishReason, Report, TokenLogprob

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Reading:
    """Deltas turned into text and tool calls."""

    def __init__(self, with_tools: bool) -> None:
        self._parser = ToolParser() if with_tools else None

    def read(self, delta: Delta) -> Sequence[str | Call]:
        """The pieces that became certain; empty text is left out."""
        if self._parser is None:
            return [delta.text] if delta.text else []
        found = self._parser.feed(delta.text)
        return found + self._parser.finish() if delta.finish else found


def ending(delta: Delta) -> tuple[FinishReason, Report]:
    """Reason and report of the last delta."""
    if delta.finish is None or delta.report is None:
        raise InternalError("the generation ended without a report")
    return delta.finish, delta.report


class WholeAnswer(Response):
    """Collects a generation and sends it as one JSON object."""

    media_type = "application/json"

    def __init__(self, generation: Generation, answer: Answer, with_tools: bool) -> None:
        self._generation = generation
        self._answer = answer
        self._reading = Reading(with_tools)
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            pieces: list[str | Call] = []
            logprobs: list[TokenLogprob] = []
            while True:
                delta = await generation.next()
                if delta is None:
                    continue
                pieces += self._reading.read(delta)
                logprobs += delta.logprobs
                if delta.finish is not None:
                    break
        body = encode(self._answer.completion(pieces, logprobs, *ending(delta)))
        headers = {"x-agentspec-trajectory": self._answer.trajectory.id}
        await Response(body, headers=headers, media_type=self.media_type)(scope, receive, send)


class EventStream(Response):
    """Sends a generation as server-sent events while it grows."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, with_tools: bool, keepalive_s: float) -> None:
        self._generation = generation
        self._answer = answer
        self._reading = Reading(with_tools)
        self._patience = keepalive_s or None
        self._calls = 0
        self._sent = float("-inf")
        """When bytes were sent last."""

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**headers, "x-agentspec-trajectory": answer.trajectory.id})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            delta = await generation.next(self._patience)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while delta is None:
                await self._send(send, b"")
                delta = await generation.next(self._patience)
            await self._send(send, event(self._answer.role_chunk()))
            while delta is None or delta.finish is None:
                await self._send(send, self._events(delta) if delta else b"")
                delta = await generation.next(self._patience)
            await self._send(send, self._events(delta) + self._last_events(delta) + DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, events: bytes) -> None:
        """Sends events, or a comment when there are none and the last bytes are long ago."""
        now = time.monotonic()
        if not events and (self._patience is None or now - self._sent < self._patience):
            return
        self._sent = now
        await send({"type": "http.response.body", "body": events or KEEP_ALIVE, "more_body": True})

    def _events(self, delta: Delta) -> bytes:
        """The events of a delta's text and calls; nothing while all of it is held back."""
        events: list[bytes] = []
        pieces = self._reading.read(delta)
        if delta.logprobs and not (pieces and isinstance(pieces[0], str)):
            events.append(event(self._answer.text_chunk("", delta.logprobs)))
        for number, piece in enumerate(pieces):
            if isinstance(piece, str):
                events.append(event(self._answer.text_chunk(piece, () if number else delta.logprobs)))
            else:
                events += [event(chunk) for chunk in self._answer.call_chunks(self._calls, piece)]
                self._calls += 1
        return b"".join(events)

    def _last_events(self, delta: Delta) -> bytes:
        finish, report = ending(delta)
        return b"".join(event(chunk) for chunk in self._answer.last_chunks(finish, self._calls, report))
