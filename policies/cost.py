"""What a target pass costs: milliseconds by number of rows and length of context, measured on this device."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


def interpolated(at: float, points: Sequence[int], values: Sequence[float]) -> float:
    """Piecewise linear through two or more points, beyond the last ones by their slope."""
    high = min(max(bisect_left(points, at), 1), len(points) - 1)
    share = (at - points[high - 1]) / (points[high] - points[high - 1])
    return values[high - 1] + (values[high] - values[high - 1]) * share


class Cost(Protocol):
    """What a pass costs, and how that is learned."""

    def __call__(self, rows: int, context: float) -> float:
        """Milliseconds of a pass over `rows` rows in all whose sequences have `context` tokens on average."""
        ...

    def observe(self, rows: int, context: float, milliseconds: float, plain: bool) -> None:
        """Learn from a pass; `plain` says that nothing was drafted in it."""
        ...

    @property
    def plain_is_due(self) -> bool:
        """Whether the next pass should draft nothing, so that plain passes stay measured."""
        ...


@dataclass(frozen=True, slots=True)
class FixedCost:
    """A made-up cost for measurements and tests: a pass costs 1 and each of its rows `per_row` beside it."""

    per_row: float = 0.0
    plain_is_due: bool = False

    def __call__(self, rows: int, context: float) -> float:
        return 1 + self.per_row * rows

    def observe(self, rows: int, context: float, milliseconds: float, plain: bool) -> None:
        """Nothing is learned."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds of a pass; linear between what was measured."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    milliseconds: tuple[tuple[float, ...], ...]
    """One tuple per context, one entry per row count."""

    @staticmethod
    def measured(samples: Mapping[int, Mapping[int, float]]) -> "CostTable":
        """From milliseconds by context and row count, two or more of each, the same row counts everywhere.

        Noise that would make more rows cheaper is levelled.
        """
        contexts = tuple(sorted(samples))
        rows = tuple(sorted(samples[contexts[0]]))
        table = []
        for context in contexts:
            levelled: list[float] = []
            for count in rows:
                levelled.append(max([samples[context][count], *levelled[-1:]]))
            table.append(tuple(levelled))
        return CostTable(contexts, rows, tuple(table))

    def __call__(self, rows: int, context: float) -> float:
        """Milliseconds of a pass over `rows` rows in all whose sequences have `context` tokens on average."""
        cheapest = self.milliseconds[0][0]
        by_context = [interpolated(rows, self.rows, table) for table in self.milliseconds]
        return max(interpolated(context, self.contexts, by_context), cheapest)


QUICKER = 0.3
SLOWER = 0.02
"""How far one pass moves what is known of its row count, down and up. Other load on the machine only ever makes
passes slower, so the estimate follows the quick ones."""

PLAIN_EVERY = 200
"""A plain pass is due after this many with drafts: the yardstick of all the others must not go stale."""


class LearnedCost:
    """A cost table that is corrected by the passes that really happen; its first measurement may be disturbed."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.corrections = [0.0] * len(table.rows)
        """Log of actual over measured milliseconds, by entry of `table.rows`."""

        self.since_plain = 0

    def __call__(self, rows: int, context: float) -> float:
        """Milliseconds of a pass. More rows never cost less: what says otherwise was disturbed."""
        larger = [count for count in self.table.rows if count > rows]
        return min(self._estimate(count, context) for count in (rows, *larger))

    def _estimate(self, rows: int, context: float) -> float:
        inside = min(max(rows, self.table.rows[0]), self.table.rows[-1])
        correction = interpolated(inside, self.table.rows, self.corrections)
        return self.table(rows, context) * math.exp(correction)

    def observe(self, rows: int, context: float, milliseconds: float, plain: bool) -> None:
        """Learn from a pass over `rows` rows; `plain` says that nothing was drafted in it."""
        self.since_plain = 0 if plain else self.since_plain + 1
        nearest = min(range(len(self.table.rows)), key=lambda i: abs(math.log(self.table.rows[i] / rows)))
        actual = math.log(milliseconds / self.table(rows, context))
        step = actual - self.corrections[nearest]
        self.corrections[nearest] += step * (QUICKER if step < 0 else SLOWER)

    @property
    def plain_is_due(self) -> bool:
        """Whether the next pass should draft nothing."""
        return self.since_plain >= PLAIN_EVERY
