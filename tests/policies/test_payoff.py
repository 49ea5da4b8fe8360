import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.policies.payoff import GAIN, Acceptance, best_cut, bucket, pruned
from agentspec.types import DraftTree


def tree_of(parents: list[int], probabilities: list[float]) -> DraftTree:
    depth, cum = [0], [0.0]
    for node in range(1, len(parents)):
        depth.append(depth[parents[node]] + 1)
        cum.append(cum[parents[node]] + math.log(probabilities[node]))
    logp = tuple([0.0, *[math.log(p) for p in probabilities[1:]]])
    size = len(parents)
    return DraftTree(tuple(range(size)), tuple(parents), tuple(depth), logp, tuple(cum), (0, *[1] * (size - 1)))


trees = st.integers(1, 6).flatmap(
    lambda size: st.tuples(
        st.tuples(*[st.integers(0, max(node - 1, 0)) for node in range(1, size)]),
        st.lists(st.floats(0.05, 0.99), min_size=size, max_size=size),
    )
)


def closed(parents: list[int], chosen: set[int]) -> bool:
    return all(parents[node] in chosen for node in chosen if node)


@given(st.lists(trees, min_size=1, max_size=2), st.floats(0.0, 1.0))
def test_the_best_cut_is_the_best_of_all_cuts(shapes: list[tuple[tuple[int, ...], list[float]]], slope: float) -> None:
    def cost(rows: int) -> float:
        return 1 + slope * rows

    batch = [tree_of([-1, *parents], probabilities) for parents, probabilities in shapes]
    reaches = [[math.exp(c) for c in tree.cum] for tree in batch]
    cuts = best_cut(reaches, cost)
    assert all(closed(list(tree.parent), set(cut)) for tree, cut in zip(batch, cuts, strict=True))

    def value(chosen: list[set[int]]) -> float:
        expected = sum(reach[node] for reach, nodes in zip(reaches, chosen, strict=True) for node in nodes)
        return expected / cost(sum(len(nodes) for nodes in chosen))

    options = [
        [
            {0, *rest}
            for keep in product([0, 1], repeat=len(tree) - 1)
            if closed(list(tree.parent), {0, *(rest := {n + 1 for n, k in enumerate(keep) if k})})
        ]
        for tree in batch
    ]
    best = max(value(list(chosen)) for chosen in product(*options))
    plain = value([{0}] * len(batch))
    got = value([set(cut) for cut in cuts])
    assert got >= best - 1e-9 or (got == plain and best <= plain * GAIN + 1e-9)


def test_nothing_is_drafted_when_rows_cost_what_tokens_bring() -> None:
    tree = tree_of([-1, 0, 1], [1.0, 0.9, 0.9])
    assert best_cut([[math.exp(c) for c in tree.cum]], lambda rows: float(rows)) == [[0]]


def test_a_pruned_tree_keeps_tokens_parents_and_origins() -> None:
    tree = tree_of([-1, 0, 0, 1, 2], [1.0, 0.5, 0.4, 0.3, 0.2])
    cut = pruned(tree, [0, 2, 4])
    assert (cut.token, cut.parent, cut.depth, cut.origin) == ((0, 2, 4), (-1, 0, 1), (0, 1, 2), (0, 1, 1))


def test_acceptance_starts_from_the_drafters_word_and_learns() -> None:
    acceptance = Acceptance()
    assert acceptance.probability(1, 0.8) == pytest.approx(0.8)
    tree = tree_of([-1, 0], [1.0, 0.8])
    for _ in range(200):
        acceptance.observe(tree, (0,))
    assert acceptance.probability(1, 0.8) < 0.1
    assert acceptance.probability(2, 0.8) == pytest.approx(0.8)
    for _ in range(2000):
        acceptance.observe(tree, (0, 1))
    assert acceptance.probability(1, 0.8) > 0.9


def test_only_children_of_visited_nodes_are_evidence() -> None:
    acceptance = Acceptance()
    acceptance.observe(tree_of([-1, 0, 1], [1.0, 0.5, 0.9]), (0,))
    assert acceptance.counts == {(1, bucket(0.5)): [0.0, 1.0]}


@given(st.floats(0, 1))
def test_every_probability_has_a_bucket(probability: float) -> None:
    assert 0 <= bucket(probability) < 12
