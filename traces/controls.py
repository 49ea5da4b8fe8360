"""What adaptive retrieval is compared with: plainer rules of when to retrieve, and texts that are not a run's own."""

from collections import Counter
from collections.abc import Sequence
from heapq import nsmallest
from typing import Protocol

import numpy as np

from agentspec.cache.activation import Credit
from agentspec.cache.automaton import Int32s
from agentspec.cache.masked import MaskedIndex

GATE = 512
"""Tokens of a history before which no rule retrieves, as in the paper."""

BLOCK = 64
"""A shuffled text keeps its tokens within blocks of so many."""


class FixedWidth:
    """The same width at every position behind the gate."""

    def __init__(self, most: int, gate: int = GATE) -> None:
        self.most = most
        self.gate = gate

    def width(self, position: int) -> int:
        return self.most if position > self.gate else 0

    def observe(self, credit: Credit, tokens: int) -> None:
        """Nothing is learned."""


class RandomActivation:
    """Widths drawn at random: 0, or one of those from 1 on with the chances given."""

    def __init__(self, active: float, chances: Sequence[float], seed: int, gate: int = GATE) -> None:
        self.random = np.random.default_rng(seed)
        self.limits = (1 - active) + active * np.cumsum(chances) / sum(chances)
        self.active = active
        self.gate = gate

    def width(self, position: int) -> int:
        if position <= self.gate:
            return 0
        drawn = float(self.random.random())
        if drawn >= self.active:
            return 0
        return 1 + int(np.searchsorted(self.limits, 1 - drawn, side="left"))

    def observe(self, credit: Credit, tokens: int) -> None:
        """Nothing is learned."""


class PeriodicProbes:
    """One width at the first position behind the gate, and again after every so many tokens, a fraction included."""

    def __init__(self, most: int, every: float, gate: int = GATE) -> None:
        self.most = most
        self.every = every
        self.next = float(gate + 1)

    def width(self, position: int) -> int:
        if position < self.next:
            return 0
        self.next += self.every * (1 + (position - self.next) // self.every)
        return self.most

    def observe(self, credit: Credit, tokens: int) -> None:
        """Nothing is learned."""


class LastHit:
    """One width as long as the last step that retrieved had a hit, and at probes."""

    def __init__(self, most: int, every: float, gate: int = GATE) -> None:
        self.probes = PeriodicProbes(most, every, gate)
        self.most = most
        self.hit = False
        self.active = False

    def width(self, position: int) -> int:
        self.active = self.probes.width(position) > 0 or self.hit
        return self.most if self.active else 0

    def observe(self, credit: Credit, tokens: int) -> None:
        if self.active:
            self.hit = credit.hit
        self.active = False


class Text(Protocol):
    """A history that continuations are taken from; `MaskedIndex` is the run's own."""

    def __len__(self) -> int:
        """Tokens of the run's own history: what a rule takes for its position."""

    def extend(self, tokens: Int32s) -> None:
        """The run's own history goes on."""

    def continuations(self, width: int) -> list[tuple[int, ...]]:
        """At most `width` ways in which it might go on."""


class Replaced:
    """Another text in the place of the run's own: asked about the end of the run's, and as long as it at most."""

    def __init__(self, other: Int32s) -> None:
        self.own = MaskedIndex()
        self.other = other
        self.index = MaskedIndex()

    def __len__(self) -> int:
        return len(self.own)

    def extend(self, tokens: Int32s) -> None:
        self.own.extend(tokens)
        self.index.extend(self.other[len(self.index) : len(self.own)])

    def continuations(self, width: int) -> list[tuple[int, ...]]:
        return self.index.continuations(width, self.own.tokens)


class Shuffled(Replaced):
    """The run's own tokens, out of order within each block; a block that is not full yet is not known."""

    def __init__(self, seed: int) -> None:
        super().__init__(np.empty(0, np.int32))
        self.random = np.random.default_rng(seed)

    def extend(self, tokens: Int32s) -> None:
        self.own.extend(tokens)
        while len(self.index) + BLOCK <= len(self.own):
            block = self.own.tokens[len(self.index) : len(self.index) + BLOCK]
            self.index.extend(self.random.permutation(block))


class Unigram:
    """Knows how often the run said each token, and nothing of their order: the commonest ones, each followed by the
    very commonest."""

    def __init__(self, depth: int = 4) -> None:
        self.depth = depth
        self.counts: Counter[int] = Counter()
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def extend(self, tokens: Int32s) -> None:
        self.counts.update(tokens.tolist())
        self.size += tokens.size

    def continuations(self, width: int) -> list[tuple[int, ...]]:
        common = nsmallest(width, self.counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return [(token, *[common[0][0]] * (self.depth - 1)) for token, _ in common]
