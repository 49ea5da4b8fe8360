"""The drafted tree against a slow twin that finds every context by looking at every place of every document."""

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.draft import Offer, draft
from agentspec.cache.estimate import LONG, OWN, SHARED, SOLE, WEIGHTS
from agentspec.cache.index import SuffixIndex
from agentspec.cache.tree import LEVELS, PROMISING, UNEXPLAINED, share

documents = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=1, max_size=3)
Documents = Sequence[Sequence[int]]


def places(texts: Documents, wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Where the wanted tokens end, in the order in which they were indexed."""
    size = len(wanted)
    return [
        (number, end)
        for number, text in enumerate(texts)
        for end in range(size, len(text) + 1)
        if list(text[end - size : end]) == list(wanted)
    ]


def levels(texts: Documents, context: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Contexts with other places than longer ones: length, that of the next one, and followers in their order."""
    found = [(size, places(texts, context[-size:])) for size in range(len(context), 0, -1)]
    known = [(size, at) for size, at in found if at]
    distinct = [level for before, level in zip([(0, []), *known], known, strict=False) if before[1] != level[1]]
    for (size, at), (shorter, _) in zip(distinct, [*distinct[1:], (0, [])], strict=False):
        yield size, shorter, [texts[number][end] for number, end in at if end < len(texts[number])]


def slow_followers(sources: Sequence[tuple[Documents, int]], context: Sequence[int], reach: float) -> dict[int, float]:
    """Probabilities of the tokens after a context that is itself reached with a probability."""
    every = [
        (-size, source, kind, size - shorter, came)
        for source, (texts, kind) in enumerate(sources)
        for size, shorter, came in levels(texts, context)
    ]
    chances: dict[int, float] = {}
    left, used, longest = 1.0, 0, 0
    for negative, _, kind, span, came in sorted(every, key=lambda level: level[:2]):
        if left <= max(UNEXPLAINED, PROMISING / reach) or used == LEVELS:
            break
        if not came:
            continue
        row = WEIGHTS[2 * kind + (used == 0)]
        part = share(row, -negative, span, len(came), len(set(came)))
        if used == 0 and span >= LONG and len(set(came)) == 1:
            part = max(part, span / (span + SOLE))
        for token in set(came):
            count = came.count(token) + (row[7] if token == came[-1] else 0.0)
            chances[token] = chances.get(token, 0.0) + left * part * count / (len(came) + row[7])
        left, used, longest = left - left * part, used + 1, max(longest, -negative)
    if len(chances) == 1:
        chances = {token: max(chance, longest / (longest + SOLE)) for token, chance in chances.items()}
    return chances


def slow_tree(sources: Sequence[tuple[Documents, int]], context: Sequence[int], budget: int) -> list[float]:
    """Log-probabilities of the likeliest paths, best first."""
    heap, found = [(-0.0, tuple[int, ...]())], list[float]()
    while heap and len(found) <= budget:
        negative, path = heapq.heappop(heap)
        found.append(-negative)
        for token, chance in slow_followers(sources, [*context, *path], math.exp(-negative)).items():
            log = -negative + math.log(chance) if chance else -math.inf
            if log > math.log(PROMISING):
                heapq.heappush(heap, (-log, (*path, token)))
    return found[1:]


def indexed(texts: Documents) -> SuffixIndex:
    index = SuffixIndex()
    for text in texts:
        index.extend(text, index.new_document())
    return index


@settings(deadline=None, max_examples=60)
@given(documents, documents, st.integers(1, 12))
def test_the_tree_equals_its_slow_twin(own: list[list[int]], shared: list[list[int]], budget: int) -> None:
    context, index = own[-1], indexed(own)
    offers = [Offer(index, index.ends[-1], OWN), Offer(indexed(shared), kind=SHARED)]
    tree = draft(offers, np.array(context, np.int32), budget)
    sources = [(own, OWN), (shared, SHARED)]
    assert np.allclose(tree.cum[1:], slow_tree(sources, context, budget))
    paths: list[list[int]] = [[]]
    for node in range(1, len(tree)):
        before = paths[tree.parent[node]]
        assert math.isclose(
            math.exp(tree.logp[node]),
            slow_followers(sources, [*context, *before], math.exp(tree.cum[tree.parent[node]]))[tree.token[node]],
            rel_tol=1e-6,
        )
        paths.append([*before, tree.token[node]])
