"""The drafter of one request: what its trajectory, its trajectory's parent and its scope would say next."""

from collections.abc import Callable, Sequence
from typing import Protocol

from agentspec.cache.automaton import Int32s
from agentspec.cache.draft import Offer, draft
from agentspec.cache.estimate import CORPUS, OWN, SHARED
from agentspec.cache.history import Conversation, TrajectoryHistory
from agentspec.cache.index import SuffixIndex, as_tokens
from agentspec.cache.local import LocalRetrieval
from agentspec.cache.prediction import Prediction, PredictionGuide
from agentspec.cache.scaffold import ScaffoldGuide
from agentspec.types import DraftTree, Origin, Outcome


class Guide(Protocol):
    """What is known of one answer beside any history."""

    @property
    def origin(self) -> Origin: ...

    def offer(self) -> Offer | None:
        """What it can be asked now."""
        ...

    def observe(self, tokens: Int32s) -> None:
        """The answer goes on."""
        ...


class HistorySession:
    """A `Drafter`. `propose` and `observe` may run on another thread than `close`."""

    def __init__(
        self,
        history: TrajectoryHistory,
        conversation: Conversation,
        parent: TrajectoryHistory | None,
        allowed: Origin,
        corpora: Sequence[SuffixIndex],
        finish: Callable[["HistorySession"], None],
    ) -> None:
        self.history = history
        self.conversation = conversation
        self.parent = parent
        self.allowed = allowed
        self.corpora = corpora
        self.finish = finish
        self.closed = False
        self.guides: list[Guide] = []
        self.local = LocalRetrieval(history.lend_answers()) if Origin.TLAR in allowed else None

    def propose(self, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes beside the root, likeliest first by `cum`."""
        with self.history.scope.lock:
            tree = draft(self.offers(), self.conversation.document.tail, budget)
            return tree if self.local is None else self.local.united(tree, budget)

    def offers(self) -> Sequence[Offer]:
        """What the allowed indexes can say."""
        document = self.conversation.document
        found: list[Offer] = []
        if Origin.TRAJECTORY in self.allowed:
            found += self.history.index.offers(OWN, document)
            if self.parent is not None and not self.parent.deleted:
                found += self.parent.index.offers(OWN)
        if Origin.SCOPE in self.allowed:
            found += self.history.scope.index.offers(SHARED)
        if Origin.CORPUS in self.allowed:
            found += [Offer(index, kind=CORPUS) for index in self.corpora]
        guided = [guide.offer() for guide in self.guides if guide.origin in self.allowed]
        return found + [offer for offer in guided if offer is not None]

    def observe(self, outcome: Outcome) -> None:
        """Add the committed tokens to the trajectory's history. After `close` they are ignored."""
        tokens = as_tokens(outcome.tokens)
        with self.history.scope.lock:
            if not self.closed:
                self.history.extend(self.conversation, tokens)
                self.history.note(outcome)
                for guide in self.guides:
                    guide.observe(tokens)
                if self.local is not None:
                    self.local.observe(tokens)

    def close(self) -> None:
        """The turn ended: what is new in it joins the scope's index and the store. Closing again does nothing.

        Belongs to the thread of the event loop that opened the session.
        """
        with self.history.scope.lock:
            if self.closed:
                return
            self.closed = True
            self.conversation.busy = False
            if self.local is not None:
                self.history.answers = self.local.answers
        self.finish(self)


def compile_guides() -> None:
    """Load or compile the kernels of guides, as `compile_kernels` does for the others."""
    guides: list[Guide] = [PredictionGuide(Prediction([1, 2])), ScaffoldGuide(SuffixIndex, [1])]
    for guide in guides:
        guide.observe(as_tokens([3]))
        guide.offer()
