"""What a replay measures, per turn, per trajectory and in total.

Decode speed is all tokens of a completion over the seconds of all its steps, the first token's included, as the
server reports them (`decode_s`); prefill and queueing are left out. Servers that report nothing are timed by the
client's clock: tokens after the first one over the seconds from the first to the last chunk with text. A sum over
turns weighs each by its length: total tokens over total seconds, never a mean of ratios.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.traces.client import Answer

RESAMPLES = 2000
SECONDS = ("queue_s", "prefill_s", "decode_s", "draft_s")


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn as the server generated it, in one or in both arms."""

    trajectory: str
    index: int
    """Index of the recorded turn in the trajectory's messages."""

    digest: str
    """Hex SHA-256 of the request without its `speculation` object."""

    answer: Answer
    """Of the arm whose figures are shown: with speculation, unless only the other one was run."""

    baseline: Answer | None = None
    """With speculation off."""

    @property
    def identical(self) -> bool | None:
        """Whether both arms gave the same tokens, or text and calls where the server gives no tokens."""
        return None if self.baseline is None else output(self.answer) == output(self.baseline)


def output(answer: Answer) -> Any:
    """What has to be equal in both arms."""
    tokens = (answer.report or {}).get("token_ids")
    if tokens is not None:
        return tokens
    return answer.text, json.dumps([call.get("function") for call in answer.calls])


def decoded(answer: Answer) -> tuple[int, float]:
    """Tokens and the seconds they took; nothing where there is nothing to measure."""
    reported = (answer.report or {}).get("decode_s")
    if reported is not None:
        return int((answer.report or {}).get("decode_tokens", answer.completion_tokens)), float(reported)
    if answer.completion_tokens > 1:
        return answer.completion_tokens - 1, answer.last_s - answer.first_s
    return 0, 0.0


def decode_rate(answers: Iterable[Answer]) -> float | None:
    """Decoded tokens per second over all answers; None when there is nothing to measure."""
    pairs = [decoded(answer) for answer in answers]
    seconds = sum(seconds for _, seconds in pairs)
    tokens = sum(tokens for tokens, _ in pairs)
    return tokens / seconds if tokens and seconds > 0 else None


def speed_ratio(turns: Sequence[TurnResult]) -> float | None:
    """Decode speed with speculation over without; None without a baseline."""
    with_speculation = decode_rate(turn.answer for turn in turns)
    without = decode_rate(turn.baseline for turn in turns if turn.baseline is not None)
    return None if with_speculation is None or without is None else with_speculation / without


def bootstrap(
    groups: Sequence[Sequence[TurnResult]],
    measure: Callable[[Sequence[TurnResult]], float | None] = speed_ratio,
    seed: int = 0,
) -> tuple[float, float] | None:
    """95 % interval of a measure over redraws of whole trajectories; None for fewer than two of them."""
    if len(groups) < 2:
        return None
    chance = random.Random(seed)
    values = []
    for _ in range(RESAMPLES):
        drawn = chance.choices(groups, k=len(groups))
        value = measure([turn for group in drawn for turn in group])
        if value is not None:
            values.append(value)
    if not values:
        return None
    values.sort()
    return values[int(0.025 * (len(values) - 1))], values[round(0.975 * (len(values) - 1))]


def summarise(turns: Sequence[TurnResult]) -> dict[str, Any]:
    """The figures of some turns. What the server did not report is None."""
    answers = [turn.answer for turn in turns]
    reports = [answer.report for answer in answers if answer.report is not None]
    tokens = sum(answer.completion_tokens for answer in answers)
    steps = sum(int(report.get("steps") or 0) for report in reports) if reports else None
    compared = [turn for turn in turns if turn.identical is not None]
    baseline = [turn.baseline for turn in turns if turn.baseline is not None]
    return {
        "turns": len(turns),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": round(tokens / steps, 4) if steps else None,
        "decode_tokens_per_s": rounded(decode_rate(answers)),
        "baseline_decode_tokens_per_s": rounded(decode_rate(baseline)),
        "speed_ratio": rounded(speed_ratio(turns)),
        "identical_turns": sum(bool(turn.identical) for turn in compared) if compared else None,
        "drafted": by_source(reports, "drafted") if reports else None,
        "accepted": by_source(reports, "accepted") if reports else None,
        "drafted_total": sum(int(report.get("drafted_total") or 0) for report in reports) if reports else None,
        "accepted_total": sum(int(report.get("accepted_total") or 0) for report in reports) if reports else None,
        **{name: seconds(reports, name) for name in SECONDS},
    }


def by_source(reports: Iterable[Mapping[str, Any]], name: str) -> dict[str, int]:
    """Sums of draft nodes by source, or by sources where two proposed the same."""
    totals: Counter[str] = Counter()
    for report in reports:
        totals.update(report.get(name) or {})
    return dict(sorted(totals.items()))


def seconds(reports: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Sum of one reported time."""
    return round(sum(float(report.get(name) or 0) for report in reports), 6) if reports else None


def rounded(value: float | None) -> float | None:
    """Four decimals are more than a clock can tell."""
    return None if value is None else round(value, 4)
