"""When continuations are retrieved, step by step: against sequences worked out by hand, and laws for all others."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.activation import (
    NOTHING,
    ActivationRule,
    Adaptive,
    CostAware,
    CostRule,
    Credit,
    Probes,
    best_width,
)

HIT = Credit(hit=True, extra=2, ranks=(2,))
RULE = ActivationRule(gate=4, half_life=1.0, probe_every=4)
"""A hit counts half after one token."""

steps = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60)
rules = st.builds(
    ActivationRule,
    gate=st.integers(0, 50),
    half_life=st.floats(0.5, 64),
    threshold=st.floats(0.01, 0.9),
    probe_every=st.integers(1, 40),
)


def widths(rule: ActivationRule, made: Sequence[tuple[bool, int]]) -> list[tuple[int, int, float]]:
    """Position, width and hit rate after each step, from the beginning of a history."""
    adaptive, position, seen = Adaptive(rule), 0, []
    for hit, tokens in made:
        width = adaptive.width(position)
        adaptive.observe(HIT if hit else NOTHING, tokens)
        seen.append((position, width, adaptive.rate))
        position += tokens
    return seen


def test_the_papers_constants_are_the_defaults() -> None:
    rule = ActivationRule()
    assert (rule.gate, rule.least, rule.most, rule.half_life, rule.threshold, rule.probe_every, rule.marginal) == (
        512,
        1,
        4,
        32,
        0.05,
        32,
        False,
    )
    assert Adaptive().decay ** 32 == pytest.approx(0.5)


def test_the_rule_worked_out_by_hand() -> None:
    made = [(True, 4), (True, 1), (True, 1), (True, 2), (False, 1), (False, 3), (False, 1), (False, 1), (False, 1)]
    assert widths(RULE, made) == [
        (0, 0, 0.0),
        (4, 0, 0.0),  # not more than 4 tokens yet, so the hit does not count
        (5, 1, 0.5),  # the first probe
        (6, 2, 0.375),  # ceil(4 * 0.5); 0.75 halved by the token jumped over
        (8, 2, 0.1875),
        (9, 1, 0.0234375),  # a probe again, though the rate asks for one as well
        (12, 0, 0.01171875),  # below the threshold, and the last step that retrieved missed
        (13, 1, 0.005859375),  # a probe
        (14, 0, 0.0029296875),
    ]


def test_a_hit_keeps_retrieval_active_below_the_threshold() -> None:
    rule = ActivationRule(gate=0, half_life=32, threshold=0.5, probe_every=100)
    assert [width for _, width, _ in widths(rule, [(False, 1), (True, 1), (True, 1), (False, 1), (True, 1)])] == [
        0,
        1,
        1,
        1,
        0,
    ]


def test_credit_may_be_what_was_gained_rather_than_a_right_beginning() -> None:
    adaptive = Adaptive(ActivationRule(gate=0, half_life=1.0, marginal=True))
    assert adaptive.width(1) == 1
    adaptive.observe(Credit(hit=True, extra=0), 1)
    assert (adaptive.rate, adaptive.hit) == (0.0, False)
    assert adaptive.width(33) == 1
    adaptive.observe(Credit(hit=False, extra=1), 1)
    assert (adaptive.rate, adaptive.hit) == (0.5, True)


@settings(deadline=None)
@given(rules, steps)
def test_widths_stay_in_their_limits_and_rates_are_rates(rule: ActivationRule, made: list[tuple[bool, int]]) -> None:
    for position, width, rate in widths(rule, made):
        assert width in ((0, 1, 2, 3, 4) if position > rule.gate else (0,))
        assert 0 <= rate <= 1


@settings(deadline=None)
@given(rules, steps)
def test_within_the_commit_limit_no_probe_is_jumped_over(rule: ActivationRule, made: list[tuple[bool, int]]) -> None:
    adaptive, position, probed = Adaptive(rule), 0, []
    for hit, tokens in made:
        before = adaptive.probes.next
        adaptive.width(position)
        if adaptive.probes.next != before:
            probed.append(position)
        committed = min(tokens, adaptive.commit_limit(position))
        adaptive.observe(HIT if hit else NOTHING, committed)
        position += committed
    reached = range(rule.gate + 1, position - committed + 1) if made else ()
    assert probed == [at for at in reached if (at - rule.gate - 1) % rule.probe_every == 0]


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 40), st.lists(st.integers(1, 90), min_size=1, max_size=40))
def test_a_probe_that_is_jumped_over_is_made_up_for(gate: int, every: int, jumps: list[int]) -> None:
    probes, position, last = Probes(gate, every), 0, None
    for jump in jumps:
        passed = range((gate if last is None else last) + 1, position + 1)
        owed = position > gate and (last is None or any((at - gate - 1) % every == 0 for at in passed))
        assert probes.due(position) == owed
        last = position if owed else last
        position += jump


@settings(deadline=None)
@given(rules, st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_misses_decay_with_the_tokens_however_they_come(rule: ActivationRule, tokens: list[int]) -> None:
    adaptive = Adaptive(rule)
    adaptive.rate = 1.0
    for number in tokens:
        adaptive.observe(NOTHING, number)
    assert adaptive.rate == pytest.approx(2 ** (-sum(tokens) / rule.half_life))


@settings(deadline=None)
@given(st.floats(1, 8), st.lists(st.floats(0, 4), max_size=5), st.floats(0.001, 0.5))
def test_the_best_width_is_where_dinkelbachs_iteration_ends(tokens: float, gains: list[float], cost: float) -> None:
    def rate(width: int) -> float:
        return (tokens + sum(gains[:width])) / (1 + width * cost)

    def surplus(width: int, ratio: float) -> float:
        return sum(gains[:width]) - ratio * width * cost

    ratio = 0.0
    for _ in range(20):
        ratio = rate(max(range(len(gains) + 1), key=lambda width: surplus(width, ratio)))
    assert rate(best_width(tokens, gains, cost)) == pytest.approx(ratio)


def test_ranks_that_do_not_pay_are_left_out() -> None:
    aware = CostAware(CostRule(gate=0, half_life=1.0, depth=4, node_cost=0.05))
    assert aware.width(1) == 4
    aware.observe(Credit(hit=True, extra=2, ranks=(2, 2, 1)), 3)
    assert aware.gains == [1.0, 0.0, 0.0, 0.0]
    assert aware.width(4) == 1  # 2 tokens in 1.2 beat 1 in 1, and 2 in 1.4
    aware.observe(NOTHING, 1)
    aware.width(5)
    aware.observe(NOTHING, 1)
    assert aware.gains == [0.25, 0.0, 0.0, 0.0]
    assert aware.width(6) == 1  # 1.25 in 1.2 is still more than 1 in 1
    aware.observe(NOTHING, 1)
    assert aware.width(7) == 0
    aware.observe(NOTHING, 26)
    assert aware.width(33) == 4  # a probe
