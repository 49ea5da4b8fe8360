"""Number arguments that name what is wrong with them."""

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return value


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


class NumberIn:
    """A converter to a number between two bounds, both allowed."""

    def __init__(self, low: float, high: float) -> None:
        self._low = low
        self._high = high

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not self._low <= value <= self._high:
            raise argparse.ArgumentTypeError(f"must be from {self._low:g} to {self._high:g}, got {text!r}")
        return value
