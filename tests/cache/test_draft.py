"""The shape, order and causality of drafts."""

import math
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentspec.cache.automaton import extend, known_prefix, match
from agentspec.cache.draft import Offer, compile_kernels, draft
from agentspec.cache.estimate import OWN, SHARED
from agentspec.cache.gaps import match_over
from agentspec.cache.index import SuffixIndex
from agentspec.cache.prediction import Prediction, PredictionGuide, resumed
from agentspec.cache.prediction import path as path_of
from agentspec.cache.scaffold import ScaffoldGuide
from agentspec.cache.session import Guide, compile_guides
from agentspec.cache.tree import grow_tree
from agentspec.types import DraftTree, Origin

tokens = st.lists(st.integers(0, 5), min_size=1, max_size=60)
KERNELS: list[Any] = [extend, match, known_prefix, grow_tree, match_over, resumed, path_of]
budgets = st.integers(0, 40)


def own(history: list[int]) -> Offer:
    """What a history says after its own end."""
    index = SuffixIndex()
    index.extend(history)
    return Offer(index, index.ends[-1], OWN)


def shared(documents: list[list[int]]) -> Offer:
    """What other documents say after a context."""
    index = SuffixIndex()
    for document in documents:
        index.extend(document, index.new_document())
    return Offer(index, kind=SHARED)


def drafted(offers: list[Offer], context: list[int], budget: int) -> DraftTree:
    return draft(offers, np.array(context, np.int32), budget)


def path(tree: DraftTree, node: int) -> list[int]:
    """Tokens from the root's child to the node."""
    found: list[int] = []
    while node > 0:
        found.insert(0, tree.token[node])
        node = tree.parent[node]
    return found


@settings(deadline=None, max_examples=100)
@given(tokens, st.lists(tokens, max_size=3), budgets)
@example(history=[1, 1], others=[[0, 1, 0]], budget=18)
def test_a_draft_is_a_valid_tree(history: list[int], others: list[list[int]], budget: int) -> None:
    tree = drafted([own(history), shared(others)], history, budget)
    assert len(tree) <= budget + 1
    assert (tree.token[0], tree.parent[0], tree.depth[0], tree.cum[0], tree.origin[0]) == (history[-1], -1, 0, 0, 0)
    seen = {(-1, tree.token[0])}
    for node in range(1, len(tree)):
        parent = tree.parent[node]
        assert 0 <= parent < node
        assert (parent, tree.token[node]) not in seen
        seen.add((parent, tree.token[node]))
        assert tree.depth[node] == tree.depth[parent] + 1
        assert tree.logp[node] <= 0
        assert math.isclose(tree.cum[node], tree.cum[parent] + tree.logp[node], abs_tol=1e-9)
        assert tree.origin[node] in (1, 2, 3)
    assert list(tree.cum[1:]) == sorted(tree.cum[1:], reverse=True)
    for parent in range(len(tree)):
        chance = sum(math.exp(tree.logp[node]) for node in range(1, len(tree)) if tree.parent[node] == parent)
        assert chance <= 1 + 1e-9


@settings(deadline=None, max_examples=100)
@given(tokens, st.lists(tokens, max_size=3))
def test_every_path_continues_a_suffix_of_the_context_inside_one_document(
    history: list[int], others: list[list[int]]
) -> None:
    tree = drafted([own(history), shared(others)], history, 32)
    places = [document[at : at + 2] for document in [history, *others] for at in range(len(document) - 1)]
    for node in range(1, len(tree)):
        assert [tree.token[tree.parent[node]], tree.token[node]] in places


@settings(deadline=None, max_examples=50)
@given(tokens, tokens, budgets)
def test_a_draft_is_a_function_of_the_past_only(past: list[int], future: list[int], budget: int) -> None:
    grown = SuffixIndex()
    grown.extend(past)
    before = drafted([Offer(grown, grown.ends[-1])], past, budget)
    grown.extend(future)
    assert drafted([own(past)], past, budget) == before


@settings(deadline=None, max_examples=50)
@given(tokens, st.integers(1, 20))
def test_a_smaller_budget_cuts_the_same_tree(history: list[int], budget: int) -> None:
    large, small = drafted([own(history)], history, 32), drafted([own(history)], history, budget)
    assert small.token == large.token[: budget + 1]
    assert small.cum == large.cum[: budget + 1]


def test_a_verbatim_repeat_gives_a_chain_as_long_as_the_budget() -> None:
    text = list(range(100, 200))
    tree = drafted([own([*text, 1, 2, 3, *text[:40]])], [text[39]], 48)
    assert tree.token[1:33] == tuple(text[40:72])
    assert tree.depth[1:33] == tuple(range(1, 33))


def test_an_end_of_a_document_is_not_crossed() -> None:
    tree = drafted([shared([[1, 2, 3], [4, 5, 6]])], [1, 2], 8)
    assert path(tree, len(tree) - 1) == [3]


def test_nothing_known_and_no_budget_propose_nothing() -> None:
    assert drafted([own([1])], [1], 8) == DraftTree.root(1)
    assert drafted([own([1, 2, 1])], [1], 0) == DraftTree.root(1)
    assert drafted([], [1], 8) == DraftTree.root(1)


def test_a_node_of_two_sources_carries_both_bits() -> None:
    tree = drafted([own([1, 2, 3, 1, 2]), shared([[1, 2, 3], [1, 2, 4]])], [1, 2], 8)
    origins = dict(zip(tree.token[1:], tree.origin[1:], strict=True))
    assert origins[3] == Origin.TRAJECTORY | Origin.SCOPE
    assert origins[4] == Origin.SCOPE


def test_the_more_recent_follower_comes_first() -> None:
    tree = drafted([own([1, 2, 8, 1, 2, 9, 1, 2])], [1, 2], 8)
    assert tree.token[1] == 9


def test_the_kernels_compile_once_for_all_callers() -> None:
    compile_kernels()
    compile_guides()
    before = [len(kernel.signatures) for kernel in KERNELS]
    index = SuffixIndex()
    index.extend([1, 2, 3, 1, 2])
    guides: list[Guide] = [PredictionGuide(Prediction([1, 2, 1, 4, 1, 3])), ScaffoldGuide(lambda: index, (5, 1, 2))]
    for guide in guides:
        guide.observe(np.array([1, 2, 4, 1], np.int32))
    offers = [offer for offer in (guide.offer() for guide in guides) if offer is not None]
    drafted([own([1, 2, 1, 2]), shared([[1, 2]]), *offers], [1, 2], 4)
    assert len(offers) == 2
    assert before == [1] * len(KERNELS)
    assert [len(kernel.signatures) for kernel in KERNELS] == before
