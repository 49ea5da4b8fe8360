"""`agentspec parity`: whether speculation changes anything, on recorded turns, down to the bits of the logits."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentspec.engine.job import Job
from agentspec.engine.service import Engine
from agentspec.types import GenerationRequest, Report, SamplingParams, Scope, SpeculationParams, Trajectory

OFF = SpeculationParams(enabled=False)


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One recorded turn, ready to be generated again."""

    trace: str
    index: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """What is kept of the logits a token was chosen from."""

    digest: bytes
    gap: float
    """Distance of the two best logits."""


@dataclass(frozen=True, slots=True)
class Made:
    """A turn generated in one way."""

    report: Report
    positions: tuple[Position, ...]
    """One per token of `report.token_ids`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two generations of a turn part for the first time."""

    against: str
    trace: str
    turn: int
    position: int
    tokens: tuple[int | None, int | None]
    """Theirs and ours; equal where only logits differ."""

    gap: float
    """Distance of the two best logits there, without speculation."""


@dataclass(slots=True)
class Comparison:
    """Generation with speculation in one way, against plain generation one by one."""

    way: str
    at_once: int
    turns: int = 0
    tokens: int = 0
    steps_on: int = 0
    steps_off: int = 0
    drafted: int = 0
    accepted: int = 0
    identical_turns: int = 0
    identical_logits_turns: int = 0
    identical_to_transformers: int | None = None
    differences: list[Difference] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether no token differs."""
        return not any(difference.tokens[0] != difference.tokens[1] for difference in self.differences)


@dataclass(frozen=True, slots=True)
class Way:
    """One sampling to compare under."""

    name: str
    sampling: SamplingParams
    turns: int
    """Recorded turns that are generated so."""


class Witness:
    """Keeps a digest of the logits behind every token that a step loop commits."""

    def __init__(self) -> None:
        self.positions: dict[Trajectory, list[Position]] = {}

    def __call__(self, job: Job, logits: Tensor) -> None:
        """Called with (tokens, vocabulary): the rows the tokens of a step were chosen from."""
        kept = self.positions.setdefault(job.request.trajectory, [])
        best = logits.topk(min(2, logits.shape[-1])).values.tolist()
        for row, top in zip(logits, best, strict=True):
            digest = hashlib.blake2b(row.contiguous().numpy().tobytes(), digest_size=16).digest()
            kept.append(Position(digest, top[0] - top[-1]))


class Transformers:
    """The same weights under transformers' own generation."""

    def __init__(self, folder: Path, ends: Iterable[int]) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.ends = sorted(ends)

    def greedy(self, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Greedy continuation, the end token included."""
        ids = torch.tensor([list(prompt)])
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=self.ends,
            pad_token_id=self.ends[0],
        )
        return tuple(made[0, len(prompt) :].tolist())


class Parity:
    """Compares on one engine; `progress` is called with (turns done, turns to do)."""

    def __init__(
        self,
        engine: Engine,
        tokens: int,
        batches: Sequence[int],
        transformers: Transformers | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.engine = engine
        self.tokens = tokens
        self.batches = batches
        self.transformers = transformers
        self.progress = progress
        self.witness = Witness()
        engine.loop.witness = self.witness

    async def compare(self, turns: Sequence[RecordedTurn], ways: Sequence[Way]) -> list[Comparison]:
        """One comparison per way and batch size."""
        total = sum(min(way.turns, len(turns)) * (1 + len(self.batches)) for way in ways)
        done = 0
        comparisons = []
        for way in ways:
            wanted = turns[: way.turns]
            plain: list[Made] = []
            for turn in wanted:
                plain.append(await self._made(turn, way, Scope(f"{way.name}, off", self.engine.model), OFF))
                done += 1
                self.progress(done, total)
            for at_once in self.batches:
                comparison = Comparison(way.name, at_once)
                scope = Scope(f"{way.name}, {at_once} at once", self.engine.model)
                pairs = list(zip(wanted, plain, strict=True))
                for first in range(0, len(pairs), at_once):
                    batch = pairs[first : first + at_once]
                    made = await asyncio.gather(
                        *[self._made(turn, way, scope, SpeculationParams()) for turn, _ in batch]
                    )
                    for (turn, off), on in zip(batch, made, strict=True):
                        count(comparison, turn, off, on)
                    done += len(batch)
                    self.progress(done, total)
                comparisons.append(comparison)
            if self.transformers is not None and way.sampling.temperature == 0:
                self._check_transformers(comparisons[-len(self.batches)], wanted, plain)
        return comparisons

    async def _made(self, turn: RecordedTurn, way: Way, scope: Scope, speculation: SpeculationParams) -> Made:
        trajectory = Trajectory(f"{turn.trace}, messages[{turn.index}]", scope)
        request = GenerationRequest(turn.prompt, trajectory, self.tokens, way.sampling, speculation)
        report = None
        async for delta in self.engine.generate(request):
            report = delta.report
        assert report is not None
        return Made(report, tuple(self.witness.positions.pop(trajectory)))

    def _check_transformers(self, comparison: Comparison, turns: Sequence[RecordedTurn], plain: Sequence[Made]) -> None:
        assert self.transformers is not None
        comparison.identical_to_transformers = 0
        for turn, off in zip(turns, plain, strict=True):
            theirs = self.transformers.greedy(turn.prompt, self.tokens)
            difference = first_difference("transformers", turn, off, theirs, None)
            comparison.identical_to_transformers += difference is None
            if difference is not None:
                comparison.differences.append(difference)


def count(comparison: Comparison, turn: RecordedTurn, off: Made, on: Made) -> None:
    """Add a turn to the sums."""
    comparison.turns += 1
    comparison.tokens += off.report.completion_tokens
    comparison.steps_on += on.report.steps
    comparison.steps_off += off.report.steps
    comparison.drafted += on.report.drafted_total
    comparison.accepted += on.report.accepted_total
    difference = first_difference("speculation", turn, off, on.report.token_ids, on.positions)
    comparison.identical_turns += on.report.token_ids == off.report.token_ids
    comparison.identical_logits_turns += difference is None
    if difference is not None:
        comparison.differences.append(difference)


def first_difference(
    against: str, turn: RecordedTurn, off: Made, tokens: Sequence[int], positions: Sequence[Position] | None
) -> Difference | None:
    """Where tokens, or the logits behind them where they are known, differ from plain generation; None if nowhere."""
    plain = off.report.token_ids
    for at in range(max(len(plain), len(tokens))):
        pair = (tokens[at] if at < len(tokens) else None, plain[at] if at < len(plain) else None)
        known = positions is not None and at < min(len(positions), len(off.positions))
        same_bits = not known or (positions is not None and positions[at].digest == off.positions[at].digest)
        if pair[0] != pair[1] or not same_bits:
            gap = off.positions[at].gap if at < len(off.positions) else float("nan")
            return Difference(against, turn.trace, turn.index, at, pair, gap)
    return None
