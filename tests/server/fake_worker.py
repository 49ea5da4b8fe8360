"""A small real worker: plays a script of deltas and remembers what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.errors import ContextTooLong
from agentspec.types import Delta, FinishReason, GenerationRequest, Report

REPORT = Report(
    prompt_tokens=0,
    cached_tokens=2,
    completion_tokens=0,
    steps=2,
    drafted={"trajectory": 4, "scope": 1},
    accepted={"trajectory": 3, "scope": 0},
    drafted_total=5,
    accepted_total=3,
    queue_s=0.001,
    prefill_s=0.01,
    decode_s=0.02,
    draft_s=0.003,
    token_ids=(1, 2, 3),
)


@dataclass
class ScriptedWorker:
    """Says each text of `script`, one token each, after `delay_s` seconds; `failure` is raised after `fail_after`."""

    script: Sequence[str] = ("Hello", " world")
    finish: FinishReason = FinishReason.STOP
    delay_s: float = 0.0
    failure: Exception | None = None
    fail_after: int = 0
    model: str = "served"
    window: int = 10_000
    requests: list[GenerationRequest] = field(default_factory=list)
    rendered: list[tuple[list[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]] = field(default_factory=list)
    running: int = 0
    closed_early: int = 0

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        self.rendered.append((list(messages), tools))
        text = "".join(str(message["content"]) for message in messages)
        return tuple(range(len(text)))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        if len(request.prompt) >= self.window:
            raise ContextTooLong(f"the prompt has {len(request.prompt)} tokens, the window {self.window}")
        self.running += 1
        complete = False
        try:
            pieces = self.script[: request.max_tokens]
            for index, text in enumerate(pieces):
                if self.failure is not None and index == self.fail_after:
                    raise self.failure
                await asyncio.sleep(self.delay_s)
                yield Delta(text, 1)
            if self.failure is not None:
                raise self.failure
            complete = True
            finish = self.finish if len(pieces) == len(self.script) else FinishReason.LENGTH
            counts = replace(REPORT, prompt_tokens=len(request.prompt), completion_tokens=len(pieces))
            yield Delta("", 0, finish, counts)
        finally:
            self.running -= 1
            self.closed_early += not complete

    def stats(self) -> Mapping[str, float]:
        return {"steps_total": 7, "running": self.running}
