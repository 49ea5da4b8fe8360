"""What a target pass costs: milliseconds by number of rows and length of context, measured on this device."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def interpolated(at: float, points: Sequence[int], values: Sequence[float]) -> float:
    """Piecewise linear through two or more points, beyond the last ones by their slope."""
    high = min(max(bisect_left(points, at), 1), len(points) - 1)
    share = (at - points[high - 1]) / (points[high] - points[high - 1])
    return values[high - 1] + (values[high] - values[high - 1]) * share


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
