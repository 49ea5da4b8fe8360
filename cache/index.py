"""`SuffixIndex`: an incremental index of every substring of a set of token documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.cache import automaton
from agentspec.cache.automaton import COUNT, STATES, Int32s
from agentspec.errors import InvalidRequest

Layout = tuple[int, ...]
"""Address and rows of each of the three arrays of an index, for kernels that read several. Growing moves them."""

Tokens = Sequence[int] | NDArray[np.integer[Any]]


def as_tokens(tokens: Tokens) -> Int32s:
    """Token ids as an array; raises `InvalidRequest` when one is no id."""
    try:
        array = np.asarray(tokens, dtype=np.int32)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"token ids must be whole numbers below 2**31: {error}") from None
    if array.ndim != 1 or (array.size and array.min() < 0):
        raise InvalidRequest("token ids must be one flat sequence of numbers from 0")
    return np.ascontiguousarray(array)


@dataclass(frozen=True, slots=True)
class Match:
    """Where a context's longest indexed suffix ends."""

    state: int
    length: int
    """Tokens of the context that match."""


NOTHING = Match(0, 0)
"""The match of an empty context."""


class SuffixIndex:
    """Documents are appended to at their ends, several may be open, and nothing matches across two of them."""

    def __init__(self) -> None:
        self.states = np.zeros((16, 6), np.int32)
        self.edges = np.zeros((16, 6), np.int32)
        self.table = np.full(16, -1, np.int32)
        self.sizes = np.array([1, 0, 0], np.int64)
        self.states[0] = (0, -1, 0, 0, -1, -1)
        self.ends: list[int] = []
        self.tokens = 0
        self.layout = self.place()
        self.new_document()

    def new_document(self) -> int:
        """Start another document; its number."""
        self.ends.append(0)
        return len(self.ends) - 1

    def extend(self, tokens: Tokens, document: int = -1) -> None:
        """Append to a document, the newest one unless told."""
        array = as_tokens(tokens)
        self.states, self.edges, self.table, self.ends[document] = automaton.extend(
            self.states, self.edges, self.table, self.sizes, self.ends[document], array
        )
        if self.layout[1::2] != (len(self.states), len(self.edges), len(self.table)):
            self.layout = self.place()
        self.tokens += array.size

    def place(self) -> Layout:
        """Where the arrays are now."""
        return tuple(
            number for array in (self.states, self.edges, self.table) for number in (array.ctypes.data, len(array))
        )

    def end(self, document: int = -1) -> Match:
        """The whole of a document as a match."""
        state = self.ends[document]
        return Match(state, int(self.states[state, automaton.LENGTH]))

    def match(self, tokens: Tokens, after: Match = NOTHING) -> Match:
        """The longest suffix of `after` and `tokens` that occurs in a document."""
        return Match(
            *automaton.match(self.states, self.edges, self.table, after.state, after.length, as_tokens(tokens))
        )

    def count(self, tokens: Tokens) -> int:
        """How often the tokens occur.

        Exact as long as each occurrence has fewer than `automaton.CHAIN` longer contexts of its own that also
        occur elsewhere with other continuations; else a lower bound.
        """
        found = self.match(tokens)
        return int(self.states[found.state, COUNT]) if found.length == len(tokens) else 0

    def known_prefix(self, tokens: Tokens) -> int:
        """How many of the first tokens occur together."""
        return automaton.known_prefix(self.states, self.edges, self.table, as_tokens(tokens))

    def __len__(self) -> int:
        return int(self.sizes[STATES])

    @property
    def bytes(self) -> int:
        """Memory of the arrays."""
        return self.states.nbytes + self.edges.nbytes + self.table.nbytes
