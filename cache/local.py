"""Retrieval from what a run itself has answered (TLAR): continuations of nearly equal contexts, when they pay."""

import math
from collections.abc import Sequence

import numpy as np

from agentspec.cache.activation import Adaptive
from agentspec.cache.automaton import Int32s
from agentspec.cache.masked import MaskedIndex
from agentspec.cache.union import Proposal, credit_of, united
from agentspec.types import DraftTree, Origin

MOST = 32_768
"""Tokens of answers that are indexed; when there are more, the older half leaves."""

EXTRA = 8
"""Most nodes that continuations take of another drafter's tree."""

FOLLOWS = 0.8
"""How often a continuation's token is accepted after the one before it."""

DOUBTFUL, CERTAIN = 0.05, 0.95
"""Limits of the estimate that a continuation begins rightly."""


class Answers:
    """All that a trajectory generated while retrieval from it was on, request after request."""

    def __init__(self) -> None:
        self.index = MaskedIndex()
        self.position = 0
        """Tokens so far, those included that have left the index."""

    def extend(self, tokens: Int32s) -> None:
        """Append what was generated."""
        self.index.extend(tokens)
        self.position += tokens.size
        if len(self.index) > MOST:
            self.index.keep(MOST // 2)


class LocalRetrieval:
    """Puts continuations from a trajectory's answers into the trees of one request, which alone uses them meanwhile."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.activation = Adaptive()
        self.base: DraftTree | None = None
        """What the step under way drafts without continuations; None if it was not asked for any."""

        self.kept: Sequence[Sequence[int]] = ()

    def united(self, base: DraftTree, budget: int) -> DraftTree:
        """The tree with continuations in the place of its least likely nodes: half of the budget at most, and no more
        than `EXTRA` where the tree has nodes of its own."""
        width = self.activation.width(self.answers.position)
        paths = self.answers.index.continuations(width)
        extra = budget if len(base) == 1 else min(EXTRA, budget // 2)
        union = united(base, [Proposal(Origin.TLAR, paths, self.estimates())], extra, budget)
        self.base, self.kept = base, union.kept[0]
        return union.tree

    def estimates(self) -> list[float]:
        """Log-probabilities of a continuation's tokens, each given the one before it."""
        begins = min(max(self.activation.rate, DOUBTFUL), CERTAIN)
        return [math.log(begins)] + [math.log(FOLLOWS)] * (self.answers.index.matching.depth - 1)

    def observe(self, tokens: Int32s) -> None:
        """Learn what a step committed."""
        if not tokens.size:
            return
        committed = tokens.tolist()
        credit = credit_of(self.base or DraftTree.root(0), self.kept, committed)
        self.activation.observe(credit, len(committed))
        self.answers.extend(tokens)
        self.base, self.kept = None, ()


def compile_kernels() -> None:
    """Load the kernels of the index, or compile them, before a request needs them."""
    index = MaskedIndex()
    index.extend(np.array([1, 2, 3, 4, 1, 2, 3, 4, 1], np.int32))
    index.positions(1)
