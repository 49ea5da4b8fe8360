"""Writes that wait for the store: a queue bounded in bytes that drops its oldest first."""

from collections import deque
from dataclasses import dataclass

from agentspec.types import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Chunks to append to a trajectory; None deletes it."""

    trajectory: Trajectory
    chunks: tuple[bytes, ...] | None
    tokens: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that wait."""
        return 256 + sum(len(chunk) for chunk in self.chunks or ())


class Outbox:
    """First in, first out."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.writes: deque[Write] = deque()
        self.bytes = 0
        self.dropped = 0

    def put(self, write: Write) -> None:
        """Add a write. The oldest are dropped for it, it alone if it is larger than the whole queue."""
        self.writes.append(write)
        self.bytes += write.bytes
        while self.bytes > self.max_bytes:
            self.remove(self.writes[0])
            self.dropped += 1

    def remove(self, write: Write) -> None:
        """Take a write out if it is still there."""
        if write in self.writes:
            self.writes.remove(write)
            self.bytes -= write.bytes

    def forget(self, trajectory: Trajectory) -> None:
        """Take out everything of a trajectory."""
        for write in [write for write in self.writes if same(write.trajectory, trajectory)]:
            self.remove(write)


def same(first: Trajectory, second: Trajectory) -> bool:
    """Whether both name one stored trajectory."""
    return (first.scope, first.id) == (second.scope, second.id)
