"""What a target pass costs: milliseconds by number of rows, measured on this device."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds of a pass at measured row counts; linear between them, and beyond the last by its slope."""

    rows: tuple[int, ...]
    milliseconds: tuple[float, ...]

    @staticmethod
    def measured(samples: Mapping[int, float]) -> "CostTable":
        """From measurements at two or more row counts; noise that would make more rows cheaper is levelled."""
        rows = tuple(sorted(samples))
        assert len(rows) >= 2
        milliseconds: list[float] = []
        for count in rows:
            milliseconds.append(max([samples[count], *milliseconds[-1:]]))
        return CostTable(rows, tuple(milliseconds))

    def __call__(self, rows: int) -> float:
        """Milliseconds of a pass over `rows` rows."""
        at = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        low, high = self.rows[at - 1], self.rows[at]
        below, above = self.milliseconds[at - 1], self.milliseconds[at]
        return max(below + (above - below) * (rows - low) / (high - low), self.milliseconds[0])
