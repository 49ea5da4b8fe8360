"""A circuit breaker: after repeated failures calls are skipped for a while, then one is let through to try."""

from collections.abc import Callable


class Breaker:
    """Knows outcomes only; what a failure was does not matter."""

    def __init__(self, clock: Callable[[], float], failures: int = 3, pause_s: float = 1.0) -> None:
        self.clock = clock
        self.most_failures = failures
        self.pause_s = pause_s
        self.failures = 0
        self.retry_at = 0.0

    @property
    def open(self) -> bool:
        """The last calls failed, and none succeeded since."""
        return self.failures >= self.most_failures

    def allows(self) -> bool:
        """Whether to try a call now. While open, one call per pause is let through."""
        if not self.open:
            return True
        if self.clock() < self.retry_at:
            return False
        self.retry_at = self.clock() + self.pause_s
        return True

    def succeeded(self) -> None:
        """A call was answered in time."""
        self.failures = 0

    def failed(self) -> None:
        """A call was not answered in time, or with an error."""
        self.failures += 1
        if self.open:
            self.retry_at = self.clock() + self.pause_s
