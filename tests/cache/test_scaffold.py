"""Documents with gaps: an answer is followed through the values of its own, and a gap is never drafted."""

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.draft import Offer, draft
from agentspec.cache.estimate import ENDING, OWN, SCAFFOLD
from agentspec.cache.gaps import GAP, LEAST, inside_gap, match_over
from agentspec.cache.index import SuffixIndex
from agentspec.cache.scaffold import LEAD, ScaffoldGuide, indexed
from agentspec.types import DraftTree, Origin

tokens = st.integers(0, 5)
gapped = st.tuples(st.lists(tokens, min_size=LEAST, max_size=6), st.lists(st.lists(tokens, min_size=1, max_size=4)))


def document(parts: tuple[list[int], list[list[int]]]) -> list[int]:
    """Tokens with gaps between them, the first after `LEAST` tokens."""
    first, others = parts
    return first + [token for part in others for token in [GAP, *part]]


def array(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def answered(text: Sequence[int], values: Sequence[int]) -> list[list[int]]:
    """An answer's tokens for each token of a document: in place of a gap, a value that no document has."""
    lengths = iter(values)
    return [list(range(100, 100 + next(lengths, 1))) if token == GAP else [token] for token in text]


@settings(deadline=None, max_examples=40)
@given(st.lists(gapped, min_size=1, max_size=3), st.lists(st.integers(1, 40), max_size=5))
def test_an_answer_is_followed_through_its_values(
    parts: list[tuple[list[int], list[list[int]]]], sizes: list[int]
) -> None:
    texts = [document(part) for part in parts]
    index = indexed(array(text) for text in texts)
    place = 0, 0
    for size, said in enumerate(answered(texts[-1], sizes), start=1):
        place = match_over(index.states, index.edges, index.table, *place, array(said))
        assert place == (index.match(texts[-1][:size]).state, size)
        assert inside_gap((index.states, index.edges, index.table), place[0]) == (texts[-1][size - 1] == GAP)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        found.append((*found[tree.parent[node]], tree.token[node]))
    return found


@settings(deadline=None, max_examples=40)
@given(st.lists(gapped, min_size=1, max_size=3), st.lists(tokens, min_size=1, max_size=20), st.integers(1, 30))
def test_a_gap_is_never_drafted_and_chances_add_up(
    parts: list[tuple[list[int], list[list[int]]]], history: list[int], budget: int
) -> None:
    scaffold, own = indexed(array(document(part)) for part in parts), SuffixIndex()
    own.extend(history)
    guide = ScaffoldGuide(lambda: scaffold, history)
    offer = guide.offer()
    assert offer is not None
    tree = draft([Offer(own, own.ends[-1], OWN), offer], array(history), budget)
    assert GAP not in tree.token
    assert set(tree.origin[1:]) <= {Origin.TRAJECTORY, Origin.SCAFFOLD, Origin.TRAJECTORY | Origin.SCAFFOLD}
    for parent in range(len(tree)):
        chances = [math.exp(tree.logp[node]) for node in range(1, len(tree)) if tree.parent[node] == parent]
        assert sum(chances) <= 1 + 1e-9
    smaller = draft([Offer(own, own.ends[-1], OWN), offer], array(history), budget // 2)
    assert paths(tree)[: len(smaller)] == paths(smaller)


def test_the_history_fills_the_gap_and_the_scaffold_goes_on_after_it() -> None:
    scaffold = indexed([array([1, 2, 3, 10, 11, GAP, 12, 13, 14, 15])])
    own = SuffixIndex()
    own.extend([11, 70, 71, 72, 12, 5, 1, 2, 3, 10, 11])
    guide = ScaffoldGuide(lambda: scaffold, [5, 1, 2, 3])
    guide.observe(array([10, 11]))
    offer = guide.offer()
    assert offer is not None
    tree = draft([Offer(own, own.ends[-1], OWN), offer], array([3, 10, 11]), 16)
    assert (70, 71, 72, 12, 13, 14, 15) in paths(tree)


def test_inside_a_value_its_end_is_a_long_shot() -> None:
    scaffold = indexed([array([1, 2, 3, 4, GAP, 12, 13, 14])])
    guide = ScaffoldGuide(lambda: scaffold, [1, 2, 3])
    guide.observe(array([4, 50, 51]))
    offer = guide.offer()
    assert offer is not None
    tree = draft([offer], array([4, 50, 51]), 3)
    assert paths(tree)[1:] == [(12,), (12, 13), (12, 13, 14)]
    assert math.isclose(math.exp(tree.logp[1]), ENDING)


def test_a_short_context_is_no_reason_to_see_a_gap() -> None:
    index = indexed([array([1, 2, 3, 4, GAP, 12])])
    assert match_over(index.states, index.edges, index.table, 0, 0, array([4, 50])) == (0, 0)


def test_a_scaffold_that_comes_late_has_heard_everything() -> None:
    found: list[SuffixIndex] = []
    guide = ScaffoldGuide(lambda: found[0] if found else None, [9, 1, 2, 3])
    assert guide.offer() is None
    guide.observe(array([4]))
    guide.observe(array([50, 51]))
    assert guide.offer() is None
    found.append(indexed([array([1, 2, 3, 4, GAP, 12])]))
    early = ScaffoldGuide(lambda: found[0], [9, 1, 2, 3])
    for said in ([4], [50, 51]):
        early.observe(array(said))
        early.offer()
    assert guide.offer() == early.offer() == Offer(found[0], found[0].match([1, 2, 3, 4, GAP]).state, SCAFFOLD, 5)
    assert LEAD == 3
