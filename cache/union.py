"""One tree of several proposers under one number of nodes: further continuations replace nodes, they never add any."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentspec.cache.activation import Credit
from agentspec.cache.growing import GrowingTree
from agentspec.types import DraftTree


@dataclass(frozen=True, slots=True)
class Proposal:
    """Continuations that a source would add to a tree."""

    origin: int
    """Its `Origin` bit."""

    paths: Sequence[Sequence[int]]
    """Tokens after the root, best continuation first."""

    logp: Sequence[float]
    """Estimates of log P(node accepted | parent accepted) by depth, for the longest path."""

    def nodes(self) -> Iterator[tuple[Sequence[int], int]]:
        """Path and depth of every node, continuation by continuation, parents first."""
        for path in self.paths:
            for depth in range(len(path)):
                yield path, depth


@dataclass(frozen=True, slots=True)
class Union:
    """What is to be verified."""

    tree: DraftTree
    kept: tuple[tuple[tuple[int, ...], ...], ...]
    """For each proposal the part of each of its paths that is in the tree."""


def united(base: DraftTree, proposals: Sequence[Proposal], extra: int, budget: int) -> Union:
    """The likeliest nodes of `base`, which are its first ones, and at most `extra` nodes that they do not have; at most
    `budget` beside the root.

    A node is known by the tokens that lead to it: one that is there already gains a source and takes no room. Where
    there is room for new ones, proposals take turns, the first one first.
    """
    grown = GrowingTree(base.token[0])
    add_nodes(grown, base, range(1, min(len(base), max(budget - extra, 0) + 1)))
    take_turns(grown, proposals, min(len(grown.token) - 1 + extra, budget))
    add_nodes(grown, base, range(1, len(base)), budget)
    kept = tuple(tuple(tuple(path[: len(grown.follow(path))]) for path in proposal.paths) for proposal in proposals)
    return Union(grown.tree(), kept)


def add_nodes(grown: GrowingTree, base: DraftTree, nodes: Sequence[int], budget: int | None = None) -> None:
    """Nodes of a tree and whose parents are there, until there are `budget` beside the root."""
    placed = {0: 0}
    for node in nodes:
        parent, token = placed.get(base.parent[node]), base.token[node]
        if parent is None:
            continue
        if budget is None or len(grown.token) <= budget or (parent, token) in grown.child:
            placed[node] = grown.add(parent, token, base.logp[node], base.origin[node])


def take_turns(grown: GrowingTree, proposals: Sequence[Proposal], most: int) -> None:
    """Each proposal in turn adds its next node that is not there, until there are `most` beside the root."""
    waiting = [(proposal, proposal.nodes()) for proposal in proposals]
    while waiting:
        left = []
        for proposal, nodes in waiting:
            if add_next(grown, proposal, nodes, most):
                left.append((proposal, nodes))
        waiting = left


def add_next(grown: GrowingTree, proposal: Proposal, nodes: Iterator[tuple[Sequence[int], int]], most: int) -> bool:
    """Add a proposal's next node that is new, and its name to the known ones before; whether one was added."""
    for path, depth in nodes:
        above = grown.follow(path[:depth])
        if len(above) < depth:
            continue
        parent, new = above[-1] if above else 0, len(grown.follow(path[: depth + 1])) == depth
        if new and len(grown.token) > most:
            continue
        grown.add(parent, path[depth], proposal.logp[depth], proposal.origin)
        if new:
            return True
    return False


def agreement(path: Sequence[int], committed: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    size = min(len(path), len(committed))
    return next((at for at in range(size) if path[at] != committed[at]), size)


def depth_reached(tree: DraftTree, committed: Sequence[int]) -> int:
    """How many of the first committed tokens are a path of the tree."""
    node = reached = 0
    for at in range(1, len(tree)):
        if reached < len(committed) and tree.parent[at] == node and tree.token[at] == committed[reached]:
            node, reached = at, reached + 1
    return reached


def credit_of(base: DraftTree, kept: Sequence[Sequence[int]], committed: Sequence[int]) -> Credit:
    """What continuations, as far as they were kept, brought a step that committed these tokens and would have drafted
    `base` without them."""
    alone = depth_reached(base, committed)
    reached = [agreement(path, committed) for path in kept]
    ranks = tuple(max(depth - alone, 0) for depth in reached)
    return Credit(any(reached), max(ranks, default=0), ranks)
