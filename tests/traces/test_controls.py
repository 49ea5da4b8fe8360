"""Plain rules and other texts that adaptive retrieval is compared with: they do what they say."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.activation import NOTHING, Activation, Credit
from agentspec.cache.automaton import Int32s
from agentspec.cache.masked import MaskedIndex
from agentspec.traces.controls import (
    BLOCK,
    FixedWidth,
    LastHit,
    PeriodicProbes,
    RandomActivation,
    Replaced,
    Shuffled,
    Text,
    Unigram,
)

HIT = Credit(hit=True, extra=1, ranks=(1,))


def ids(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)


def widths(rule: Activation, positions: Sequence[int], hits: Sequence[int] = ()) -> list[int]:
    """What a rule asks for at some positions, if the steps at `hits` have hits."""
    asked = []
    for position in positions:
        asked.append(rule.width(position))
        rule.observe(HIT if position in hits else NOTHING, 1)
    return asked


def test_fixed_width_is_always_active_behind_the_gate() -> None:
    assert widths(FixedWidth(3, gate=4), range(8)) == [0, 0, 0, 0, 0, 3, 3, 3]


def test_random_widths_have_the_chances_they_were_given() -> None:
    rule = RandomActivation(0.3, (1, 0, 2, 1), seed=4, gate=10)
    drawn = np.bincount(widths(rule, range(20_011)), minlength=5)
    assert drawn[0] - 11 == pytest.approx(0.7 * 20_000, rel=0.02)
    assert drawn[2] == 0
    assert drawn[[1, 3, 4]] == pytest.approx([1500, 3000, 1500], rel=0.1)
    assert 0 not in widths(RandomActivation(1.0, (1, 1), seed=4, gate=0), range(1, 200))


def test_probes_come_at_their_interval_and_late_ones_at_once() -> None:
    assert widths(PeriodicProbes(2, 3, gate=1), range(10)) == [0, 0, 2, 0, 0, 2, 0, 0, 2, 0]
    assert widths(PeriodicProbes(2, 2.5, gate=1), range(13)) == [0, 0, 2, 0, 0, 2, 0, 2, 0, 0, 2, 0, 2]
    assert widths(PeriodicProbes(2, 4, gate=1), [0, 5, 6, 9, 10, 23, 24, 26]) == [0, 2, 2, 0, 2, 2, 0, 2]


def test_the_last_hit_keeps_retrieval_on_until_a_miss() -> None:
    assert widths(LastHit(4, 10, gate=0), range(14), hits=(1, 2, 5)) == [0, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0]


def test_another_runs_text_is_asked_about_the_end_of_this_ones() -> None:
    text = Replaced(ids([1, 2, 3, 4, 7, 7, 7, 7, 7]))
    text.extend(ids([9, 9, 9, 9, 9, 1, 2]))
    assert text.continuations(2) == []
    text.extend(ids([3, 4]))
    assert text.continuations(2) == [(7, 7, 7, 7)]
    assert (len(text), len(text.index)) == (9, 9)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 9), max_size=100), max_size=6))
def test_a_shuffled_text_has_the_same_tokens_block_by_block(parts: list[list[int]]) -> None:
    shuffled, said = Shuffled(seed=1), list[int]()
    for part in parts:
        shuffled.extend(ids(part))
        said += part
    known = shuffled.index.tokens.tolist()
    assert len(known) == len(said) // BLOCK * BLOCK
    for start in range(0, len(known), BLOCK):
        assert sorted(known[start : start + BLOCK]) == sorted(said[start : start + BLOCK])


def test_a_unigram_knows_the_commonest_tokens() -> None:
    unigram = Unigram(depth=3)
    assert unigram.continuations(2) == []
    unigram.extend(ids([5, 3, 5, 4, 3, 5]))
    assert unigram.continuations(2) == [(5, 5, 5), (3, 5, 5)]
    assert len(unigram) == 6


@pytest.mark.parametrize("make", [MaskedIndex, lambda: Replaced(ids(range(50))), lambda: Shuffled(2), Unigram])
def test_texts_count_the_runs_own_tokens(make: type[Text]) -> None:
    text = make()
    for size in (3, 70, 0, 1):
        text.extend(ids(range(size)))
    assert len(text) == 74
