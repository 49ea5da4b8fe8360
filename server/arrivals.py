"""Requests that were received and whose trajectory is not known yet, and what is deleted meanwhile."""

import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deletion:
    """A trajectory that was deleted, and what it had sent first."""

    moment: float
    owner: str
    digests: frozenset[bytes]


class Arrivals:
    """Remembers deletions for as long as a request is under way that was received before them."""

    def __init__(self) -> None:
        self._under_way: list[float] = []
        self._deletions: list[Deletion] = []

    @contextmanager
    def receiving(self) -> Iterator[float]:
        """A request is under way; the moment of its receipt, by the monotonic clock."""
        moment = time.monotonic()
        self._under_way.append(moment)
        try:
            yield moment
        finally:
            self._under_way.remove(moment)
            oldest = min(self._under_way, default=math.inf)
            self._deletions = [deletion for deletion in self._deletions if deletion.moment >= oldest]

    def note(self, owner: str, digests: Collection[bytes]) -> None:
        """A trajectory is deleted at this moment."""
        if self._under_way:
            self._deletions.append(Deletion(time.monotonic(), owner, frozenset(digests)))

    def deleted(self, owner: str, since: float) -> bool:
        """Whether a trajectory was deleted at a moment or later."""
        return any(deletion.owner == owner and deletion.moment >= since for deletion in self._deletions)

    def sender(self, digest: bytes, since: float) -> str | None:
        """The trajectory that had sent something first, of those deleted at a moment or later."""
        found = (one.owner for one in self._deletions if one.moment >= since and digest in one.digests)
        return next(found, None)
