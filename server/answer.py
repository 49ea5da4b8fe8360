"""The JSON objects of an answer: whole completions and the chunks of a stream."""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentspec.server.tools import Call
from agentspec.types import FinishReason, Report, TokenLogprob, Trajectory

LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Characters that some stream readers take for the end of a line."""


LEAST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON has no number for; OpenAI's own."""


def new_completion_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


@dataclass(frozen=True, slots=True)
class Answer:
    """What all objects of one answer share."""

    model: str
    trajectory: Trajectory
    with_usage: bool = False
    """Whether a stream ends with a usage chunk."""

    with_report: bool = False
    """Whether the whole report is attached."""

    token_bytes: Callable[[int], bytes] | None = None
    """Spells tokens where log-probabilities were asked for; None where they were not."""

    id: str = field(default_factory=new_completion_id)
    created: int = field(default_factory=now)

    def completion(
        self,
        pieces: Sequence[str | Call],
        logprobs: Sequence[TokenLogprob],
        finish: FinishReason,
        report: Report,
    ) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text.strip() else text}
        if calls:
            message["tool_calls"] = [opening(call) for call in calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": finish_reason(finish, len(calls)),
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage(report), **self._extras(report)}

    def role_chunk(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def text_chunk(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        return self._chunk({"content": text}, logprobs=logprobs)

    def call_chunks(self, index: int, call: Call) -> list[dict[str, Any]]:
        """The opening fragment with id and name, then the arguments."""
        opened = {"index": index, **opening(Call(call.name, ""))}
        arguments = {"index": index, "function": {"arguments": call.arguments}}
        return [self._chunk({"tool_calls": [opened]}), self._chunk({"tool_calls": [arguments]})]

    def last_chunks(self, finish: FinishReason, calls: int, report: Report) -> list[dict[str, Any]]:
        """The finish chunk and, if asked for, the usage chunk; the figures of the run are on the last one."""
        finished = self._chunk({}, finish_reason(finish, calls))
        if not self.with_usage:
            return [{**finished, **self._extras(report)}]
        head = self._head("chat.completion.chunk")
        return [finished, {**head, "choices": [], "usage": usage(report), **self._extras(report)}]

    def _chunk(
        self, delta: dict[str, Any], finish: FinishReason | None = None, logprobs: Sequence[TokenLogprob] = ()
    ) -> dict[str, Any]:
        known = self._logprobs(logprobs) if logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": known, "finish_reason": finish}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.with_usage else chunk

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """One entry per token; None where they were not asked for."""
        if self.token_bytes is None:
            return None
        entries = []
        for one in logprobs:
            best = [self._spelled(token, logprob) for token, logprob in one.top]
            entries.append({**self._spelled(one.token, one.logprob), "top_logprobs": best})
        return {"content": entries, "refusal": None}

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        assert self.token_bytes is not None
        spelled = self.token_bytes(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(spelled)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _extras(self, report: Report) -> dict[str, Any]:
        extras: dict[str, Any] = {"timings": timings(report)}
        if self.with_report:
            names = {"trajectory": self.trajectory.id, "parent": self.trajectory.parent}
            extras["agentspec"] = {**names, **asdict(report)}
        return extras


def opening(call: Call) -> dict[str, Any]:
    """A call under a fresh id."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def finish_reason(finish: FinishReason, calls: int) -> FinishReason:
    """A model that stopped by itself after a call stopped for it."""
    return FinishReason.TOOL_CALLS if calls and finish is FinishReason.STOP else finish


def usage(report: Report) -> dict[str, Any]:
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": report.cached_tokens},
    }


def timings(report: Report) -> dict[str, Any]:
    """Counts and milliseconds under llama.cpp's names; `prompt_n` leaves out the tokens that were cached."""
    return {
        "prompt_n": report.prompt_tokens - report.cached_tokens,
        "prompt_ms": round(report.prefill_s * 1000, 3),
        "predicted_n": report.completion_tokens,
        "predicted_ms": round(report.decode_s * 1000, 3),
        "draft_n": report.drafted_total,
        "draft_n_accepted": report.accepted_total,
    }


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    """One server-sent event; escapes what careless readers take for line breaks."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.translate(LINE_BREAKS).encode() + b"\n\n"
