"""`SuffixIndex` against a slow twin that keeps the documents and looks everywhere."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.automaton import CHAIN, COUNT
from agentspec.cache.index import SuffixIndex
from agentspec.errors import InvalidRequest

appends = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=12)), max_size=12)
contexts = st.lists(st.integers(0, 3), max_size=10)


class SlowIndex:
    """Obviously right: every question looks at every place of every document."""

    def __init__(self) -> None:
        self.documents: list[list[int]] = []

    def count(self, tokens: Sequence[int]) -> int:
        """Places where the tokens stand."""
        wanted, size = list(tokens), len(tokens)
        return sum(
            document[at : at + size] == wanted for document in self.documents for at in range(len(document) - size + 1)
        )

    def longest(self, context: Sequence[int]) -> int:
        """Length of the longest suffix that stands anywhere."""
        return max(size for size in range(len(context) + 1) if size == 0 or self.count(context[-size:]))


def both(work: Sequence[tuple[int, Sequence[int]]]) -> tuple[SuffixIndex, SlowIndex]:
    """The same documents in both, appended to in turns."""
    fast, slow = SuffixIndex(), SlowIndex()
    for document, tokens in work:
        while len(slow.documents) <= document:
            slow.documents.append([])
            if len(slow.documents) > len(fast.ends):
                fast.new_document()
        slow.documents[document] += tokens
        fast.extend(tokens, document)
    return fast, slow


@settings(deadline=None, max_examples=200)
@given(appends, contexts)
def test_longest_match_equals_the_slow_twin(work: list[tuple[int, list[int]]], context: list[int]) -> None:
    fast, slow = both(work)
    assert fast.match(context).length == slow.longest(context)


@settings(deadline=None, max_examples=200)
@given(appends, contexts.filter(bool))
def test_counts_equal_the_slow_twin(work: list[tuple[int, list[int]]], tokens: list[int]) -> None:
    fast, slow = both(work)
    assert fast.count(tokens) == slow.count(tokens)


@settings(deadline=None, max_examples=100)
@given(appends, contexts, contexts)
def test_a_match_continues_while_the_index_grows(
    work: list[tuple[int, list[int]]], context: list[int], more: list[int]
) -> None:
    fast, slow = both(work)
    started = fast.match(context)
    fast.extend(more)
    slow.documents = slow.documents or [[]]
    slow.documents[-1] += more
    known = context[len(context) - started.length :]
    assert fast.match(more, after=started).length == slow.longest(known + more)


@settings(deadline=None, max_examples=100)
@given(appends, contexts)
def test_known_prefix_is_the_longest_prefix_that_stands_anywhere(
    work: list[tuple[int, list[int]]], tokens: list[int]
) -> None:
    fast, slow = both(work)
    known = fast.known_prefix(tokens)
    assert known == 0 or slow.count(tokens[:known]) > 0
    assert known == len(tokens) or slow.count(tokens[: known + 1]) == 0


def test_no_match_crosses_two_documents() -> None:
    index = SuffixIndex()
    index.extend([1, 2])
    index.new_document()
    index.extend([3, 4])
    assert index.match([1, 2, 3]).length == 1
    assert index.count([2, 3]) == 0


def test_many_followers_are_found_through_the_table() -> None:
    index = SuffixIndex()
    for token in range(100, 400):
        index.extend([1, token])
    assert [index.count([1, token]) for token in range(99, 401)] == [0] + [1] * 300 + [0]
    assert index.count([1]) == 300


def test_one_token_repeated_stays_linear_and_short_counts_are_lower_bounds() -> None:
    index = SuffixIndex()
    index.extend([7] * 20_000)
    assert index.match([7] * 30_000).length == 20_000
    assert len(index) == 20_001
    assert index.count([7] * 19_990) == 11
    assert 1 <= index.count([7]) <= 20_000
    assert int(index.states[:, COUNT].max()) >= CHAIN


def test_memory_per_token_is_bounded() -> None:
    index = SuffixIndex()
    index.extend(np.random.default_rng(1).integers(0, 5000, 20_000))
    assert index.tokens == 20_000
    assert index.bytes < 20_000 * 300


@pytest.mark.parametrize("tokens", [[-1], [2**31], ["a"], [[1, 2]], [None]])
def test_what_is_no_token_id_is_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        SuffixIndex().extend(tokens)
