"""Drafts from matches: the tree that several indexes propose together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentspec.cache.automaton import LENGTH, Int32s, Int64s
from agentspec.cache.estimate import OWN, WEIGHTS
from agentspec.cache.index import SuffixIndex
from agentspec.cache.tree import SOURCES, grow_tree
from agentspec.types import DraftTree


@dataclass(frozen=True, slots=True)
class Offer:
    """An index and what it is asked: what followed the end of a document of its own, or else the last tokens."""

    index: SuffixIndex
    end: int = -1
    """State of the document's end, from `SuffixIndex.ends`, or of another place in it; -1 for none."""

    kind: int = OWN
    """`OWN`, `SHARED`, `SCAFFOLD`, `PREDICTION` or `CORPUS`."""

    length: int | None = None
    """How many tokens lead to that state; None for as many as it stands for at most."""

    @property
    def place(self) -> tuple[int, int]:
        """State and length."""
        longest = int(self.index.states[self.end, LENGTH]) if self.end >= 0 else 0
        return self.end, longest if self.length is None else self.length


EMPTY = SuffixIndex()
Columns = tuple[Int64s, Int32s, Int32s, Int32s]


def columns(offers: Sequence[Offer], tail: Int32s) -> Columns:
    """Offers after a context whose last tokens are `tail`, as kernels take them: layouts of `SOURCES` indexes, the last
    ones empty; kinds, ends and their lengths of the offers alone; the tail. Nobody may extend the indexes meanwhile."""
    layouts = [offer.index.layout for offer in offers] + [EMPTY.layout] * (SOURCES - len(offers))
    return (
        np.array(layouts, np.int64),
        np.array([offer.kind for offer in offers], np.int32),
        np.array([offer.place for offer in offers], np.int32).reshape(-1, 2).T.copy(),
        tail,
    )


def draft(offers: Sequence[Offer], tail: Int32s, budget: int) -> DraftTree:
    """The likeliest tree of at most `budget` nodes after a context whose last tokens are `tail`, one at least."""
    if budget <= 0 or not offers:
        return DraftTree.root(int(tail[-1]))
    nodes, logs = grow_tree(*columns(offers, tail), WEIGHTS, budget)
    token, parent, depth, origin = map(tuple, nodes.tolist())
    logp, cum = map(tuple, logs.tolist())
    return DraftTree(token, parent, depth, logp, cum, origin)


def compile_kernels() -> None:
    """Make the first request as quick as the others: load the kernels, or compile them, which takes many seconds."""
    index = SuffixIndex()
    index.extend([1, 2, 1])
    index.match([1, 2])
    index.known_prefix([1, 2])
    draft([Offer(index, index.ends[-1]), Offer(index)], np.array([2, 1], np.int32), 2)
