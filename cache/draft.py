"""Drafts from matches: the tree that several indexes propose together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentspec.cache.estimate import OWN, WEIGHTS
from agentspec.cache.index import NOTHING, Match, SuffixIndex
from agentspec.cache.tree import SOURCES, grow_tree
from agentspec.types import DraftTree


@dataclass(frozen=True, slots=True)
class Offer:
    """An index, the match of the context in it, and its kind: `OWN` or `SHARED`."""

    index: SuffixIndex
    match: Match
    kind: int = OWN


EMPTY = Offer(SuffixIndex(), NOTHING)


def draft(offers: Sequence[Offer], root: int, budget: int) -> DraftTree:
    """The likeliest tree of at most `budget` nodes after `root`, the last token of the matched context."""
    if budget <= 0 or not offers:
        return DraftTree.root(root)
    padded = (*offers, *[EMPTY] * (SOURCES - len(offers)))
    nodes, logs = grow_tree(
        tuple(offer.index.states for offer in padded),
        tuple(offer.index.edges for offer in padded),
        tuple(offer.index.table for offer in padded),
        np.array([offer.kind for offer in padded], np.int32),
        WEIGHTS,
        np.array([offer.match.state for offer in padded], np.int32),
        np.array([offer.match.length for offer in padded], np.int32),
        root,
        budget,
    )
    token, parent, depth, origin = (tuple(row) for row in nodes.tolist())
    logp, cum = (tuple(row) for row in logs.tolist())
    return DraftTree(token, parent, depth, logp, cum, origin)


def compile_kernels() -> None:
    """Make the first request as quick as the others: load the kernels, or compile them, which takes many seconds."""
    index = SuffixIndex()
    index.extend([1, 2, 1])
    index.match([1, 2])
    index.known_prefix([1, 2])
    draft([Offer(index, index.end())], 1, 2)
