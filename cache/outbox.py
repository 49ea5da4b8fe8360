"""Writes that wait for the store: queues bounded in bytes together, one for each server, that drop their oldest first.

A deletion is never dropped for a later write.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from agentspec.types import Trajectory

NUMBERS = count()


class Kind(Enum):
    """What a write does."""

    APPEND = 1
    NOTE = 2
    """Tells the scope of an append."""

    DELETE = 3
    DISOWN = 4
    """Tells the scope of a deletion."""


LASTING = (Kind.DELETE, Kind.DISOWN)


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Something to be done for a trajectory."""

    trajectory: Trajectory
    kind: Kind
    chunks: tuple[bytes, ...] = ()
    tokens: int = 0
    name: str = ""
    """Tells an append from all others, so that a repetition does nothing."""

    kept: int = 0
    """Bytes that the trajectory has after an append."""

    found: bool = False
    """Whether a deletion found something."""

    done: asyncio.Future[bool] | None = None
    """Gets whether a deletion found something, once the scope was told."""

    number: int = field(default_factory=lambda: next(NUMBERS))
    """Its place in the order of all writes."""

    @property
    def bytes(self) -> int:
        """Bytes that wait."""
        return 256 + sum(len(chunk) for chunk in self.chunks)


class Outbox:
    """First in, first out, for each lane; a lane is the name of the server that a write goes to."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.lanes: dict[str, deque[Write]] = {}
        self.bytes = 0
        self.active: set[Write] = set()
        """Writes that are being done: they stay until that is over."""

        self.dropped = 0
        """Appends that were."""

        self.withdrawn = 0
        """Appends that waited when their trajectory was deleted."""

    def __len__(self) -> int:
        return sum(len(lane) for lane in self.lanes.values())

    def __iter__(self) -> Iterator[Write]:
        for lane in self.lanes.values():
            yield from lane

    def put(self, write: Write, lane: str = "") -> None:
        """Add a write. The oldest that wait are dropped for it, it alone if it is larger than the whole queue."""
        self.lanes.setdefault(lane, deque()).append(write)
        self.bytes += write.bytes
        while self.bytes > self.max_bytes and (oldest := self.oldest()) is not None:
            self.drop(oldest)

    def drop(self, write: Write) -> None:
        """Take a write out that is not done."""
        self.remove(write)
        self.dropped += write.kind is Kind.APPEND

    def oldest(self) -> Write | None:
        """The oldest write that may be dropped."""
        heads = (next(filter(self.waits, lane), None) for lane in self.lanes.values())
        return min((head for head in heads if head is not None), key=lambda write: write.number, default=None)

    def waits(self, write: Write) -> bool:
        """Whether a write may be taken out before it is done."""
        return write.kind not in LASTING and write not in self.active

    def batch(self, lane: str, most: int) -> list[Write]:
        """The first writes of a lane, each of another trajectory: they may be done in any order."""
        found: dict[tuple[object, str], Write] = {}
        for write in self.lanes.get(lane, ()):
            key = (write.trajectory.scope, write.trajectory.id)
            if key in found or len(found) == most:
                break
            found[key] = write
        return list(found.values())

    def remove(self, write: Write) -> None:
        """Take a write out if it is still there."""
        for name, lane in self.lanes.items():
            if write in lane:
                lane.remove(write)
                self.bytes -= write.bytes
                if not lane:
                    del self.lanes[name]
                return

    def forget(self, trajectory: Trajectory) -> None:
        """Take out everything that waits to be appended to a trajectory."""
        for write in [write for write in self if self.waits(write) and same(write.trajectory, trajectory)]:
            self.remove(write)
            self.withdrawn += write.kind is Kind.APPEND


def same(first: Trajectory, second: Trajectory) -> bool:
    """Whether both name one stored trajectory."""
    return (first.scope, first.id) == (second.scope, second.id)
