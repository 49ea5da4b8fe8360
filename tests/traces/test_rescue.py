"""Walks of activation rules along recorded answers, against the trees and the credit that a live request would have."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.activation import ActivationRule, Adaptive, CostAware, CostRule
from agentspec.cache.automaton import Int32s
from agentspec.cache.growing import GrowingTree
from agentspec.cache.masked import MaskedIndex
from agentspec.cache.union import Proposal, credit_of, united
from agentspec.traces.controls import FixedWidth
from agentspec.traces.rescue import (
    DEPTH,
    NONE,
    OWN,
    WIDTH,
    Arm,
    Prepared,
    agrees,
    greedy_chains,
    judged,
    lookup_chains,
    no_chains,
    prepared,
    walk,
)
from agentspec.traces.simulate import PromptLookup, Recording, Written
from agentspec.types import DraftTree

tokens = st.lists(st.integers(0, 2), max_size=6)
paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=DEPTH), max_size=WIDTH)


def ids(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)


def rows(values: Sequence[Sequence[int]]) -> Int32s:
    """Paths as a walk has them."""
    padded = [[*path, *[NONE] * (DEPTH - len(path))] for path in [*values, *[()] * (WIDTH - len(values))]]
    return np.array(padded, np.int32)


def chain_tree(chain: Sequence[int]) -> DraftTree:
    grown, node = GrowingTree(9), 0
    for token in chain:
        node = grown.add(node, token, -0.5, 1)
    return grown.tree()


def recording(*turns: tuple[Sequence[int], Sequence[int]]) -> Recording:
    return Recording("run", "source", "domain", "group", tuple(Written(0, ids(a), ids(b)) for a, b in turns))


def ready(run: Recording, gate: int) -> list[Prepared]:
    return list(prepared(run, {OWN: MaskedIndex()}, frozenset(), gate, lookup_chains))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 2), max_size=DEPTH), paths, tokens, st.integers(0, 12), st.integers(0, WIDTH))
def test_a_judged_step_is_the_united_tree_and_its_credit(
    chain: list[int], proposed: list[list[int]], answer: list[int], cap: int, width: int
) -> None:
    base, found = chain_tree(chain), np.zeros(WIDTH, np.int32)
    alone = agrees(rows([chain])[0], ids(answer), 0)
    nodes, hit = judged(rows([chain])[0], alone, rows(proposed), ids(answer), 0, width, cap, found)
    logp = (-0.1,) * DEPTH
    union = united(base, [Proposal(2, proposed[:width], logp)], cap, len(chain) + cap)
    credit = credit_of(base, union.kept[0], answer)
    assert nodes == len(union.tree) - len(base)
    assert hit == credit.hit
    assert found[: min(width, len(proposed))].tolist() == list(credit.ranks)
    assert max(found[:width].tolist(), default=0) == credit.extra


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_lookup_chains_are_those_of_prompt_lookup(prompt: list[int], answer: list[int]) -> None:
    lookup = PromptLookup()
    lookup.open(recording(), ids(prompt))
    expected = []
    for token in answer:
        expected.append(list(lookup.propose(DEPTH)[0][1:]))
        lookup.observe(ids([token]))
    chains = lookup_chains(ids(prompt), ids(answer))
    assert [[token for token in chain if token != NONE] for chain in chains.tolist()] == expected


def test_greedy_chains_end_with_the_first_wrong_token() -> None:
    chains = greedy_chains(ids([1, 2, 9, 4, 5, 6, 7]), ids([1, 2, 3, 4, 5, 6, 7]))
    assert chains[0].tolist() == [1, 2, 9, NONE]
    assert chains[2].tolist() == [9, NONE, NONE, NONE]
    assert chains[3].tolist() == [4, 5, 6, 7]
    assert chains[5].tolist() == [6, 7, NONE, NONE]


def test_a_walk_counts_what_it_did_behind_the_gate() -> None:
    loop = [at % 6 for at in range(40)]
    turns = ready(recording(([9], loop[:20]), ([8], loop[20:])), gate=10)
    made = walk(turns, Arm(lambda: FixedWidth(1, gate=10), cap=4), gate=10)
    # The chain copies the loop from the eighth token on: five tokens a step from 7, 12 and 17. In the second turn it
    # knows nothing of the loop at first; the continuation does, and brings four tokens twice.
    assert (made.steps, made.tokens) == (2 + 4, 5 + 3 + 20)
    assert made.active == made.steps
    assert (made.extra, made.rescues, made.misses) == (8, 2, 2)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=3), st.integers(0, 12))
def test_walks_hold_their_budgets_and_reach_every_end(answers: list[list[int]], cap: int) -> None:
    run = recording(*[([7], answer) for answer in answers])
    turns = ready(run, gate=0)
    adaptive = Arm(lambda: Adaptive(ActivationRule(gate=0)), cap)
    for arm in (adaptive, Arm(lambda: CostAware(CostRule(gate=0)), cap), Arm(adaptive.rule, cap, lasting=True)):
        made = walk(turns, arm, gate=0)
        assert made.nodes <= cap * made.active
        assert made.rescues <= made.misses <= made.steps
        assert made.rescues <= made.extra <= DEPTH * made.rescues
        assert made.tokens <= sum(len(answer) for answer in answers)
    alone = walk(turns, Arm(lambda: FixedWidth(0, gate=0), cap), gate=0)
    assert (alone.nodes, alone.extra) == (0, 0)
    assert alone.steps >= walk(turns, Arm(lambda: FixedWidth(4, gate=0), 12), gate=0).steps


def test_a_cap_between_two_numbers_is_held_on_average() -> None:
    source = np.random.default_rng(2)
    run = recording(([7], source.integers(0, 4, 3000).tolist()))
    turns = list(prepared(run, {OWN: MaskedIndex()}, frozenset(), 100, no_chains))
    made = walk(turns, Arm(lambda: FixedWidth(4, gate=100), 2.25), gate=100)
    assert abs(made.nodes / made.steps - 2.25) < 0.02
