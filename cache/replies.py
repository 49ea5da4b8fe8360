"""What a model answered, token by token, for the prompts in which it comes back as text."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import digest_of
from agentspec.types import Scope, Trajectory

OVERHEAD = 400
"""Bytes of a reply beside its tokens, about."""

MOST_AT_ONE_PLACE = 128
"""Replies to one prompt; the oldest leave first."""

GENERATIONS = 8
"""Trajectories, from a request's own upwards, whose replies may come back in it."""

Known = Mapping[bytes, Sequence["Reply"]]
"""Replies by the digest of all tokens before theirs."""


@dataclass(slots=True, eq=False)
class Reply:
    """An answer, and what its prompt has after its last control token, such as the name of the role."""

    tokens: Int32s
    """Up to the first control token of the answer."""

    asked: int
    """Bytes of text that are the prompt's."""

    size: int
    """Bytes of text altogether, as the client got it."""

    broken_off: bool = False
    """The client left: it may have got less."""

    counted: bool = False
    """It came back before."""

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return OVERHEAD + self.tokens.nbytes


@dataclass(slots=True)
class Line:
    """The replies of one trajectory."""

    parent: str | None
    replies: OrderedDict[bytes, list[Reply]] = field(default_factory=OrderedDict)
    """Those first whose prompt was answered first."""

    @property
    def bytes(self) -> int:
        """Memory that they take."""
        return OVERHEAD + sum(reply.bytes for group in self.replies.values() for reply in group)


class Replies:
    """Replies by trajectory within a number of bytes; those of the least recently used trajectory leave first, its
    oldest before others. Nothing crosses a scope. Belongs to one thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._lines: OrderedDict[tuple[Scope, str], Line] = OrderedDict()

    def __contains__(self, trajectory: Trajectory) -> bool:
        return (trajectory.scope, trajectory.id) in self._lines

    def open(self, trajectory: Trajectory) -> None:
        """A request of a trajectory is there: the trajectory is now the most recently used."""
        key = trajectory.scope, trajectory.id
        if key not in self._lines:
            self._lines[key] = Line(trajectory.parent)
            self.bytes += OVERHEAD
        elif self._lines[key].parent is None:
            self._lines[key].parent = trajectory.parent
        self._lines.move_to_end(key)
        self._settle()

    def add(self, trajectory: Trajectory, before: bytes, reply: Reply) -> None:
        """Keep a reply; `before` is the digest of all tokens before its own. A reply that is kept already stays."""
        self.open(trajectory)
        line = self._lines.get((trajectory.scope, trajectory.id))
        if line is None:
            return
        group = line.replies.setdefault(before, [])
        if any(np.array_equal(other.tokens, reply.tokens) and other.size == reply.size for other in group):
            return
        group.append(reply)
        self.bytes += reply.bytes
        if len(group) > MOST_AT_ONE_PLACE:
            self.bytes -= group.pop(0).bytes
        self._settle()

    def known(self, trajectory: Trajectory) -> list[Known]:
        """The replies of a trajectory, then those of its parent, and so on."""
        found: list[Known] = []
        name: str | None = trajectory.id
        while name is not None and len(found) < GENERATIONS:
            line = self._lines.get((trajectory.scope, name))
            if line is None:
                break
            found.append(line.replies)
            name = line.parent
        return found

    def forget(self, scope: Scope, digests: Collection[str]) -> bool:
        """Drop the trajectories of a scope that have some digests; whether there were any."""
        owners = [key for key in self._lines if key[0] == scope and digest_of(Trajectory(key[1], scope)) in digests]
        for key in owners:
            self.bytes -= self._lines.pop(key).bytes
        return bool(owners)

    def bytes_of(self, trajectory: Trajectory) -> int:
        """Memory of the replies of a trajectory."""
        line = self._lines.get((trajectory.scope, trajectory.id))
        return line.bytes if line is not None and line.replies else 0

    def _settle(self) -> None:
        """Let replies go until the others fit."""
        while self.bytes > self.limit and self._lines:
            key, line = next(iter(self._lines.items()))
            if line.replies:
                _, group = line.replies.popitem(last=False)
                self.bytes -= sum(reply.bytes for reply in group)
            else:
                self.bytes -= line.bytes
                del self._lines[key]
