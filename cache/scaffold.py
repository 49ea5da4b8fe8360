"""What the form of an answer fixes before anything of it is known, indexed, and followed through one answer."""

from collections.abc import Callable, Iterable

from agentspec.cache.automaton import Int32s
from agentspec.cache.draft import Offer
from agentspec.cache.estimate import SCAFFOLD
from agentspec.cache.gaps import match_over
from agentspec.cache.index import SuffixIndex, Tokens, as_tokens
from agentspec.types import Origin

LEAD = 3
"""Last tokens of a prompt, those that begin the answer's turn, with which the documents begin."""


def indexed(documents: Iterable[Int32s]) -> SuffixIndex:
    """An index of documents in which `GAP` stands for what is not known."""
    index = SuffixIndex()
    for document in documents:
        index.extend(document, index.new_document())
    return index


class ScaffoldGuide:
    """Where an answer stands in a scaffold, which may come while the answer is being written."""

    origin = Origin.SCAFFOLD

    def __init__(self, find: Callable[[], SuffixIndex | None], prompt: Tokens) -> None:
        """`find` gives the scaffold, None while it is not there."""
        self.find = find
        self.unread = [as_tokens(prompt[-LEAD:])]
        self.place = 0, 0

    def observe(self, tokens: Int32s) -> None:
        """The answer goes on."""
        self.unread.append(tokens)

    def offer(self) -> Offer | None:
        """What is to be asked now."""
        index = self.find()
        if index is None:
            return None
        for tokens in self.unread:
            self.place = match_over(index.states, index.edges, index.table, *self.place, tokens)
        self.unread.clear()
        return Offer(index, self.place[0], SCAFFOLD, self.place[1])
