"""An index that forgets its oldest tokens: two generations of `SuffixIndex`, the older one dropped whole."""

from dataclasses import dataclass, field

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.draft import Offer
from agentspec.cache.estimate import OWN
from agentspec.cache.index import SuffixIndex

OVERLAP = 32
"""Tokens before a new document's own that are indexed again, so that its first tokens have a context."""


@dataclass(slots=True)
class Document:
    """A growing document of a `RollingIndex`; its number in a generation changes when that one is dropped."""

    tail: Int32s = field(default_factory=lambda: np.empty(0, np.int32))
    """The last `OVERLAP` tokens."""

    index: SuffixIndex | None = None
    number: int = -1


class RollingIndex:
    """Holds between half of `limit` and `limit` tokens once it is full. Not safe for concurrent use."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 2 * OVERLAP)
        self.generations = [SuffixIndex()]
        self.dropped = 0

    @property
    def bytes(self) -> int:
        """Memory of both generations."""
        return sum(index.bytes for index in self.generations)

    @property
    def tokens(self) -> int:
        """Tokens held, overlaps included."""
        return sum(index.tokens for index in self.generations)

    def extend(self, document: Document, tokens: Int32s) -> None:
        """Append to a document."""
        while tokens.size:
            room = self.half - self.generations[-1].tokens
            if room <= OVERLAP:
                self.rotate()
                continue
            index = self.generations[-1]
            if document.index is not index:
                document.index, document.number = index, index.new_document()
                index.extend(document.tail, document.number)
                room -= document.tail.size
            part, tokens = tokens[:room], tokens[room:]
            index.extend(part, document.number)
            document.tail = np.concatenate((document.tail, part[-OVERLAP:]))[-OVERLAP:]

    def rotate(self) -> None:
        """Start a generation, and drop the one before the last."""
        self.dropped += sum(index.tokens for index in self.generations[:-1])
        self.generations = [self.generations[-1], SuffixIndex()]

    def known(self, tokens: Int32s) -> int:
        """How many of the first tokens one document already holds together."""
        return max(index.known_prefix(tokens) for index in self.generations)

    def offers(self, kind: int = OWN, document: Document | None = None) -> list[Offer]:
        """What each generation can be asked: what followed the whole of its own `document`, or else a context's end."""
        return [
            Offer(index, index.ends[document.number] if document and document.index is index else -1, kind)
            for index in self.generations
        ]
