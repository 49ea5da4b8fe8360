"""The JSON objects of an answer, whole or in chunks: what those of all endpoints have in common."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from agentspec.errors import InternalError
from agentspec.types import Delta, FinishReason, Origin, Report, Trajectory

PREDICTION = str(Origin.PREDICTION.name).lower()

LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Characters that some stream readers take for the end of a line."""

LEAST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON has no number for; OpenAI's own."""


def new_id() -> str:
    return secrets.token_hex(12)


def now() -> int:
    return int(time.time())


@dataclass(frozen=True, slots=True)
class Frame:
    """What all objects of one answer share."""

    model: str
    trajectory: Trajectory
    prompts: int = 1
    n: int = 1
    """Choices of each prompt; they have neighbouring indexes."""

    with_usage: bool = False
    """Whether a stream ends with a usage chunk."""

    with_report: bool = False
    """Whether the whole report is attached."""

    with_prediction: bool = False
    """Whether usage says what became of a prediction."""

    id: str = field(default_factory=new_id)
    created: int = field(default_factory=now)

    @property
    def choices(self) -> int:
        """Choices of all prompts."""
        return self.prompts * self.n


class Answer(ABC):
    """One answer as it grows. A stream takes `opening` and the `chunks` of every delta; a whole answer gathers the
    deltas with `add`, and is `whole` once it is `complete`."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._reports: dict[int, Report] = {}

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self._reports) == self.frame.choices

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """The chunks before those of the first delta."""

    @abstractmethod
    def _contents(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta's text."""

    @abstractmethod
    def _ending(self, delta: Delta, finish: FinishReason) -> dict[str, Any]:
        """The chunk that ends a choice."""

    @abstractmethod
    def _gather(self, delta: Delta) -> None:
        """Keep what a delta brings."""

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]:
        """A choice that has ended."""

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta; the very last one of the answer carries the figures of the run."""
        found = self._contents(delta)
        if delta.finish is None:
            return found
        self._end(delta)
        found.append(self._ending(delta, delta.finish))
        if not self.complete:
            return found
        if self.frame.with_usage:
            found.append({**self._head(self.chunk_kind), "choices": [], "usage": self._usage()})
        return [*found[:-1], {**found[-1], **self._extras()}]

    def add(self, delta: Delta) -> None:
        """Gather a delta."""
        self._gather(delta)
        if delta.finish is not None:
            self._end(delta)

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._choice(index) for index in range(self.frame.choices)]
        return {**self._head(self.kind), "choices": choices, "usage": self._usage(), **self._extras()}

    def _end(self, delta: Delta) -> None:
        if delta.report is None:
            raise InternalError("the generation ended without a report")
        self._reports[delta.index] = delta.report

    def _chunk(self, index: int, finish: FinishReason | None = None, **content: Any) -> dict[str, Any]:
        choice = {"index": index, **content, "finish_reason": finish}
        chunk = {**self._head(self.chunk_kind), "choices": [choice]}
        return {**chunk, "usage": None} if self.frame.with_usage else chunk

    def _head(self, kind: str) -> dict[str, Any]:
        frame = self.frame
        return {"id": f"{self.id_prefix}-{frame.id}", "object": kind, "created": frame.created, "model": frame.model}

    def _usage(self) -> dict[str, Any]:
        found = usage(self._prompt_reports(), self._choice_reports())
        if self.frame.with_prediction:
            found["completion_tokens_details"] = prediction_usage(self._choice_reports())
        return found

    def _choice_reports(self) -> list[Report]:
        return [self._reports[index] for index in range(self.frame.choices)]

    def _prompt_reports(self) -> list[Report]:
        """One for each prompt: that of its first choice, which computed it."""
        return self._choice_reports()[:: self.frame.n]

    def _extras(self) -> dict[str, Any]:
        reports = self._choice_reports()
        extras: dict[str, Any] = {"timings": timings(self._prompt_reports(), reports)}
        if self.frame.with_report:
            trajectory = self.frame.trajectory
            figures = asdict(reports[0]) if len(reports) == 1 else {"choices": [asdict(report) for report in reports]}
            extras["agentspec"] = {"trajectory": trajectory.id, "parent": trajectory.parent, **figures}
        return extras


def usage(prompts: Sequence[Report], choices: Sequence[Report]) -> dict[str, Any]:
    """Tokens of an answer: those of each prompt once, those of every choice."""
    prompt_tokens = sum(report.prompt_tokens for report in prompts)
    completion_tokens = sum(report.completion_tokens for report in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(report.cached_tokens for report in prompts)},
    }


def prediction_usage(choices: Sequence[Report]) -> dict[str, int]:
    """Tokens that were drafted from the prediction, by what verification said."""
    drafted, accepted = (
        sum(count for counts in told for names, count in counts.items() if PREDICTION in names.split("+"))
        for told in ([report.drafted for report in choices], [report.accepted for report in choices])
    )
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def timings(prompts: Sequence[Report], choices: Sequence[Report]) -> dict[str, Any]:
    """Counts and milliseconds under llama.cpp's names; `prompt_n` leaves out the tokens that were cached. Of several
    choices, which are made side by side, the slowest says `predicted_ms`."""
    return {
        "prompt_n": sum(report.prompt_tokens - report.cached_tokens for report in prompts),
        "prompt_ms": round(sum(report.prefill_s for report in prompts) * 1000, 3),
        "predicted_n": sum(report.completion_tokens for report in choices),
        "predicted_ms": round(max(report.decode_s for report in choices) * 1000, 3),
        "draft_n": sum(report.drafted_total for report in choices),
        "draft_n_accepted": sum(report.accepted_total for report in choices),
    }


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    """One server-sent event; escapes what careless readers take for line breaks."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.translate(LINE_BREAKS).encode() + b"\n\n"
