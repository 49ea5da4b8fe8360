"""`MaskedIndex` against a slow twin that compares a context with every place of the whole text."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.automaton import Int32s
from agentspec.cache.masked import MaskedIndex, Matching

tokens = st.lists(st.integers(0, 2), max_size=60)
matchings = st.builds(Matching, st.integers(2, 5), st.integers(0, 2), st.integers(1, 5))


def ids(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)


def everywhere(text: Sequence[int], context: Sequence[int], matching: Matching) -> list[int]:
    """Positions, latest first, with whole continuations, before which the text nearly says `context`."""
    size, depth = matching.context, matching.depth
    if len(context) < size:
        return []
    asked = context[-size:]
    return [
        at
        for at in range(len(text) - depth, size - 1, -1)
        if sum(a != b for a, b in zip(text[at - size : at], asked, strict=True)) <= matching.substitutions
    ]


def continuations(text: Sequence[int], positions: Sequence[int], depth: int) -> list[tuple[int, ...]]:
    return [tuple(text[at : at + depth]) for at in positions]


@settings(deadline=None, max_examples=150)
@given(matchings, st.lists(tokens, max_size=5), st.integers(0, 6))
def test_continuations_equal_the_slow_twin_after_every_append(
    matching: Matching, parts: list[list[int]], width: int
) -> None:
    index, text = MaskedIndex(matching), list[int]()
    for part in parts:
        index.extend(ids(part))
        text += part
        found = everywhere(text, text, matching)[:width]
        assert index.positions(width) == found
        assert index.continuations(width) == continuations(text, found, matching.depth)


@settings(deadline=None, max_examples=80)
@given(matchings, tokens, tokens)
def test_another_texts_end_is_looked_up_the_same_way(matching: Matching, text: list[int], other: list[int]) -> None:
    index = MaskedIndex(matching)
    index.extend(ids(text))
    assert index.positions(9, ids(other)) == everywhere(text, other, matching)[:9]


@settings(deadline=None, max_examples=40)
@given(matchings, tokens, st.integers(0, 40), tokens)
def test_what_is_kept_is_the_end(matching: Matching, text: list[int], kept: int, more: list[int]) -> None:
    index, rest = MaskedIndex(matching), text[max(len(text) - kept, 0) :]
    index.extend(ids(text))
    index.keep(kept)
    assert index.tokens.tolist() == rest
    index.extend(ids(more))
    assert index.positions(9) == everywhere(rest + more, rest + more, matching)[:9]


def test_token_by_token_equals_at_once_in_a_long_text() -> None:
    text = np.random.default_rng(3).integers(0, 6, 4000).astype(np.int32)
    slowly, at_once = MaskedIndex(), MaskedIndex()
    for token in text:
        slowly.extend(np.array([token], np.int32))
    at_once.extend(text)
    found = everywhere(text.tolist(), text.tolist(), Matching())
    assert len(found) > 20
    assert slowly.positions(100) == at_once.positions(100) == found[:100]


def test_a_continuation_counts_once_it_is_complete() -> None:
    index = MaskedIndex(Matching(context=2, substitutions=0, depth=3))
    index.extend(ids([1, 2, 7, 8, 1, 2]))
    assert index.continuations(4) == [(7, 8, 1)]
    index.extend(ids([9, 1, 2]))
    assert index.continuations(4) == [(9, 1, 2), (7, 8, 1)]


@pytest.mark.parametrize(("substitutions", "found"), [(0, []), (1, [(5, 6)]), (2, [(5, 6)])])
def test_a_changed_token_is_forgiven_as_often_as_is_permitted(substitutions: int, found: list[tuple[int, int]]) -> None:
    index = MaskedIndex(Matching(context=3, substitutions=substitutions, depth=2))
    index.extend(ids([1, 2, 3, 5, 6, 20, 21, 22, 1, 9, 3]))
    assert index.continuations(4) == found


def test_memory_is_that_of_the_arrays() -> None:
    index = MaskedIndex()
    index.extend(np.random.default_rng(1).integers(0, 50_000, 10_000).astype(np.int32))
    assert 36 * 10_000 <= index.bytes <= 200 * 10_000
