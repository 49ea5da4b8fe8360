"""What drafts are worth: acceptance probabilities learned from verified steps, and the budget that pays best."""

import math
from collections.abc import Callable, Sequence

from agentspec.types import DraftTree

BUCKETS = 12
"""Classes of a drafter's own estimate, evenly spaced in log odds between 2 % and 98 %."""

PRIOR = 12.0
"""Observations that the drafter's own estimate counts for."""

MEMORY = 400.0
"""Observations after which older ones have lost most of their weight."""

GAIN = 1.03
"""Drafting must promise this much more than plain decoding: below it noise decides."""


def bucket(probability: float) -> int:
    """Class of a raw estimate."""
    clipped = min(max(probability, 0.02), 0.98)
    odds = math.log(clipped / (1 - clipped)) / math.log(0.98 / 0.02)
    return min(int((odds + 1) / 2 * BUCKETS), BUCKETS - 1)


class Acceptance:
    """Calibrates P(node accepted | parent accepted) per source and class of the drafter's estimate."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], list[float]] = {}

    def probability(self, origin: int, raw: float) -> float:
        """Calibrated probability of a node whose drafter estimated `raw`."""
        accepted, seen = self.counts.get((origin, bucket(raw)), (0.0, 0.0))
        return (accepted + PRIOR * raw) / (seen + PRIOR)

    def calibrated(self, tree: DraftTree) -> list[float]:
        """Probability of every node's whole path; 1 for the root."""
        reach = [1.0] * len(tree)
        for node in range(1, len(tree)):
            own = self.probability(tree.origin[node], math.exp(tree.logp[node]))
            reach[node] = reach[tree.parent[node]] * own
        return reach

    def observe(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Learn from a walk: children of visited nodes were tested, all others say nothing."""
        visited = set(path)
        for node in range(1, len(tree)):
            if tree.parent[node] in visited:
                key = (tree.origin[node], bucket(math.exp(tree.logp[node])))
                count = self.counts.setdefault(key, [0.0, 0.0])
                fade = 1 - 1 / MEMORY if count[1] > MEMORY else 1.0
                count[0] = count[0] * fade + (node in visited)
                count[1] = count[1] * fade + 1


def best_cut(reaches: Sequence[Sequence[float]], cost: Callable[[int], float], extra_rows: int = 0) -> list[list[int]]:
    """For each sequence's tree, the nodes (root first, ascending) whose verification pays best together.

    Maximises expected tokens per millisecond of the whole batch over all cuts by path probability; `extra_rows`
    are in the pass anyway. Plain decoding is kept unless a cut promises `GAIN` over it.
    """
    nodes = sorted(
        (-reach[node], sequence, node) for sequence, reach in enumerate(reaches) for node in range(1, len(reach))
    )
    rows = len(reaches) + extra_rows
    expected = float(len(reaches))
    plain = expected / cost(rows)
    best, size = plain * GAIN, 0
    for count, (negative, _, _) in enumerate(nodes, start=1):
        expected -= negative
        value = expected / cost(rows + count)
        if value > best:
            best, size = value, count
    kept: list[list[int]] = [[0] for _ in reaches]
    for _, sequence, node in nodes[:size]:
        kept[sequence].append(node)
    return [sorted(chosen) for chosen in kept]


def pruned(tree: DraftTree, nodes: Sequence[int]) -> DraftTree:
    """The tree of the given nodes (ascending, root first, closed under parents)."""
    index = {node: i for i, node in enumerate(nodes)}
    return DraftTree(
        token=tuple(tree.token[node] for node in nodes),
        parent=tuple(index[tree.parent[node]] if node else -1 for node in nodes),
        depth=tuple(tree.depth[node] for node in nodes),
        logp=tuple(tree.logp[node] for node in nodes),
        cum=tuple(tree.cum[node] for node in nodes),
        origin=tuple(tree.origin[node] for node in nodes),
    )
