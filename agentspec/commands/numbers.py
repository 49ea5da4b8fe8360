"""Number arguments that name what is wrong with them."""

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r:.60}")
    return value


def natural(text: str) -> int:
    """A whole number of at least 0."""
    value = whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text!r:.60}")
    return value


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r:.60}") from None


class NumberIn:
    """A converter to a number between two bounds, both allowed unless `above` leaves out the lower one."""

    def __init__(self, low: float, high: float, *, above: bool = False) -> None:
        self._low = low
        self._high = high
        self._above = above

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r:.60}") from None
        if not self._low <= value <= self._high:
            raise argparse.ArgumentTypeError(f"must be from {self._low:g} to {self._high:g}, got {text!r:.60}")
        if self._above and value == self._low:
            raise argparse.ArgumentTypeError(f"must be above {self._low:g}, got {text!r:.60}")
        return value
