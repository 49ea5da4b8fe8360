"""Which trajectories were deleted lately: what was read of one before, or received for it, is not to be kept."""

import math
import time
from collections import OrderedDict

from agentspec.cache.codec import digest_of
from agentspec.types import Trajectory

MOST = 10_000
"""Deletions that are remembered, the latest."""


class Deletions:
    """Moments of deletions, by the monotonic clock. Belongs to one thread."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.moments: OrderedDict[str, float] = OrderedDict()
        """By the digests of the trajectories, the latest last."""

        self.forgotten = -math.inf
        """The moment of the latest deletion that is remembered no longer."""

    def note(self, digest: str) -> None:
        """A trajectory is deleted at this moment."""
        self.moments.pop(digest, None)
        self.moments[digest] = time.monotonic()
        if len(self.moments) > self.most:
            _, self.forgotten = self.moments.popitem(last=False)

    def since(self, trajectory: Trajectory, moment: float) -> bool:
        """Whether a trajectory was deleted at a moment or later. Where the moment is so long ago that this is not known
        any more, it counts as deleted."""
        return self.moments.get(digest_of(trajectory), self.forgotten) >= moment
