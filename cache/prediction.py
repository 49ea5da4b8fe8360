"""A predicted text as a source of drafts: followed token by token, and found again after the answer left it."""

import numpy as np

from agentspec.cache.automaton import LENGTH, LINK, Int32s, after
from agentspec.cache.draft import Offer
from agentspec.cache.estimate import PREDICTION
from agentspec.cache.gaps import GAP
from agentspec.cache.index import SuffixIndex, Tokens, as_tokens
from agentspec.compiled import compiled
from agentspec.types import Origin

LOOK_BACK = 32
"""Last tokens of an answer by which its place in the prediction is found again."""

BEHIND = 8
"""So many tokens more must match for a place before the last certain one than for a place after it."""

CERTAIN = 4
"""After so many tokens in a row a place is certain: later ones are looked for after it."""


BEGINNING = np.arange(GAP - 16, GAP, dtype=np.int32)
"""Stands before a prediction: no tokens of any text, but a context of its first one, trusted like so many tokens that
match."""


@compiled
def resumed(predicted: Int32s, tail: Int32s, last: int) -> tuple[int, int]:
    """Where an answer that ends with `tail` goes on in the prediction: how many of its tokens come before that, and how
    many of the tail's tokens match there; -1 and 0 for nowhere.

    The longest match wins, and of equal ones the nearest to `last`. Places before `last` count `BEHIND` tokens less.
    """
    best, most, distance = -1, 0, 0
    for place in range(1, predicted.shape[0] + 1):
        length = 0
        while length < min(place, tail.shape[0]) and predicted[place - 1 - length] == tail[tail.shape[0] - 1 - length]:
            length += 1
        value = length if place >= last else length - BEHIND
        nearer = value == most and value > 0 and abs(place - last) < distance
        if value > most or nearer:
            best, most, distance = place, value, abs(place - last)
    if best >= 0 and best < last:
        most += BEHIND
    return best, most


@compiled
def path(states: Int32s, edges: Int32s, table: Int32s, document: Int32s) -> Int32s:
    """The states of a document's beginnings, from the empty one to the whole."""
    found = np.zeros(document.shape[0] + 1, np.int32)
    for at, token in enumerate(document):
        found[at + 1] = after(states, edges, table, found[at], token)
    return found


class Prediction:
    """A predicted text, indexed; the guides of several answers may share one."""

    def __init__(self, predicted: Tokens) -> None:
        self.tokens = as_tokens(predicted)
        self.index = SuffixIndex()
        whole = np.concatenate((BEGINNING, self.tokens))
        self.index.extend(whole)
        self.path = path(self.index.states, self.index.edges, self.index.table, whole)[BEGINNING.size :]
        """States of the prediction's beginnings, from the empty one to the whole."""


class PredictionGuide:
    """Where an answer stands in the text that was predicted for it."""

    origin = Origin.PREDICTION

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self.place = 0
        """Tokens of the prediction before what is expected next; -1 where the answer left it."""

        self.matched = BEGINNING.size
        """Tokens up to the place that the answer has too."""

        self.last = 0
        """The last place that was certain."""

        self.tail = np.empty(0, np.int32)

    def observe(self, tokens: Int32s) -> None:
        """The answer goes on."""
        known = np.concatenate((self.tail, tokens))
        for size, token in enumerate(tokens.tolist(), start=self.tail.size + 1):
            if not self.follows(token):
                self.place, self.matched = resumed(
                    self.prediction.tokens, known[max(size - LOOK_BACK, 0) : size], self.last
                )
            if self.matched >= CERTAIN:
                self.last = self.place
        self.tail = known[-LOOK_BACK:]

    def follows(self, token: int) -> bool:
        """Whether a token is the expected one; then the place is behind it."""
        if not 0 <= self.place < self.prediction.tokens.size or self.prediction.tokens[self.place] != token:
            return False
        self.place, self.matched = self.place + 1, self.matched + 1
        return True

    def offer(self) -> Offer | None:
        """What is to be asked now: the prediction after the place, or, less, after other places like it."""
        if not 0 <= self.place < self.prediction.tokens.size:
            return None
        index, state = self.prediction.index, int(self.prediction.path[self.place])
        shorter, longest = (int(index.states[at, LENGTH]) for at in (index.states[state, LINK], state))
        return Offer(index, state, PREDICTION, min(shorter + self.matched, longest))
