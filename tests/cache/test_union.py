"""Trees of several proposers under one budget, against a slow twin that knows a node by the tokens that lead to it."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.activation import Credit
from agentspec.cache.growing import GrowingTree
from agentspec.cache.union import Proposal, credit_of, depth_reached, united
from agentspec.engine.plan import fault_of
from agentspec.types import DraftTree

Prefix = tuple[int, ...]

paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4)
offers = st.lists(paths, max_size=3)
LOGP = (-0.1, -0.2, -0.3, -0.4)


def tree_of(all_paths: Sequence[Sequence[int]], origin: int = 1, root: int = 9) -> DraftTree:
    """A tree of some paths."""
    grown = GrowingTree(root)
    for path in all_paths:
        node = 0
        for token in path:
            node = grown.add(node, token, -0.5, origin)
    return grown.tree()


def prefixes(tree: DraftTree) -> list[Prefix]:
    """Every node by the tokens that lead to it, in order, the root left out."""
    names: list[Prefix] = [()]
    for node in range(1, len(tree)):
        names.append((*names[tree.parent[node]], tree.token[node]))
    return names[1:]


def slowly_united(base: DraftTree, proposed: Sequence[Sequence[Sequence[int]]], extra: int, budget: int) -> set[Prefix]:
    """The nodes that a union should have."""
    own = prefixes(base)
    chosen = own[: max(budget - extra, 0)]
    most = min(len(chosen) + extra, budget)
    queues = [[tuple(path[: depth + 1]) for path in part for depth in range(len(path))] for part in proposed]
    while any(queues) and len(chosen) < most:
        for queue in queues:
            while queue and queue[0] in chosen:
                queue.pop(0)
            if queue and len(chosen) < most:
                chosen.append(queue.pop(0))
    for prefix in own:
        if prefix not in chosen and len(chosen) < budget and (len(prefix) == 1 or prefix[:-1] in chosen):
            chosen.append(prefix)
    return set(chosen)


@settings(deadline=None, max_examples=200)
@given(paths, offers, st.integers(0, 8), st.integers(0, 16))
def test_a_union_has_the_nodes_of_the_slow_twin(
    base_paths: list[list[int]], proposed: list[list[list[int]]], extra: int, budget: int
) -> None:
    base = tree_of(base_paths)
    proposals = [Proposal(2 << at, part, LOGP) for at, part in enumerate(proposed)]
    union = united(base, proposals, extra, budget)
    found = prefixes(union.tree)
    assert len(found) == len(set(found)) <= budget
    assert set(found) == slowly_united(base, proposed, extra, budget)
    assert fault_of(union.tree, 9, vocabulary=10) is None
    for part, kept in zip(proposed, union.kept, strict=True):
        for path, survived in zip(part, kept, strict=True):
            assert survived == tuple(path[: len(survived)])
            assert len(survived) == len(path) or tuple(path[: len(survived) + 1]) not in found


@settings(deadline=None, max_examples=100)
@given(paths, offers, st.integers(0, 8), st.integers(0, 16))
def test_a_node_carries_the_sources_whose_path_it_is_on(
    base_paths: list[list[int]], proposed: list[list[list[int]]], extra: int, budget: int
) -> None:
    base = tree_of(base_paths)
    proposals = [Proposal(2 << at, part, LOGP) for at, part in enumerate(proposed)]
    tree = united(base, proposals, extra, budget).tree
    for prefix, origin in zip(prefixes(tree), tree.origin[1:], strict=True):
        named = {1} if prefix in prefixes(base) else set()
        for at, part in enumerate(proposed):
            if any(tuple(path[: len(prefix)]) == prefix for path in part):
                named.add(2 << at)
        assert origin != 0
        assert all(origin & bit == 0 for bit in (1, 2, 4, 8) if bit not in named)


def test_new_nodes_replace_the_least_likely_ones() -> None:
    base = tree_of([[1, 2, 3, 4]])
    union = united(base, [Proposal(8, [(5, 6)], LOGP)], extra=2, budget=4)
    assert prefixes(union.tree) == [(1,), (1, 2), (5,), (5, 6)]
    assert union.tree.origin == (0, 1, 1, 8, 8)
    assert union.tree.logp[3:] == LOGP[:2]
    assert union.tree.cum[4] == pytest.approx(LOGP[0] + LOGP[1])


def test_what_was_not_used_goes_back_to_the_base() -> None:
    base = tree_of([[1, 2, 3, 4]])
    union = united(base, [Proposal(8, [(1, 7)], LOGP)], extra=3, budget=4)
    assert prefixes(union.tree) == [(1,), (1, 7), (1, 2), (1, 2, 3)]
    assert union.tree.origin == (0, 1 | 8, 8, 1, 1)


def test_proposals_take_turns_and_what_is_there_already_costs_no_turn() -> None:
    base = tree_of([[1]])
    proposals = [Proposal(2, [(3, 3, 3)], LOGP), Proposal(4, [(1, 4, 4)], LOGP)]
    union = united(base, proposals, extra=3, budget=4)
    assert prefixes(union.tree) == [(1,), (3,), (1, 4), (3, 3)]
    assert union.tree.origin == (0, 1 | 4, 2, 4, 2)
    assert union.kept == (((3, 3),), ((1, 4),))


def test_credit_is_what_the_base_alone_would_not_have_reached() -> None:
    base = tree_of([[1, 2], [4]])
    assert depth_reached(base, [1, 2, 3]) == 2
    assert credit_of(base, [(1, 2, 3), (5,)], [1, 2, 3, 4]) == Credit(hit=True, extra=1, ranks=(1, 0))
    assert credit_of(base, [(4, 5), (6,)], [4, 6]) == Credit(hit=True, extra=0, ranks=(0, 0))
    assert credit_of(base, [(6, 7), (6, 7, 8)], [6, 7, 8]) == Credit(hit=True, extra=3, ranks=(2, 3))
    assert credit_of(base, [(), (6,)], [1]) == Credit(hit=False, extra=0, ranks=(0, 0))
    assert credit_of(base, [], [1]) == Credit(hit=False)
