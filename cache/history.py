"""The history of one trajectory: its conversations as they grew, and the index over them."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.local import Answers
from agentspec.cache.rolling import OVERLAP, Document, RollingIndex
from agentspec.types import Outcome

CONVERSATIONS = 4
"""Conversations of a trajectory whose prefix is remembered; a trajectory rarely has more at once."""

STRETCH = 64
"""A repeated stretch at the start of a document is left out of the index from this length on."""

BOUNDARY = -1
"""Stands between two documents in a stored history."""

OVERHEAD = 4096
"""Bytes of a history that holds no tokens."""


def common_prefix(first: Int32s, second: Int32s) -> int:
    """Length of the longest common prefix."""
    size = min(first.size, second.size)
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if different.size else size


@dataclass(slots=True, eq=False)
class Conversation:
    """A sequence of tokens that later prompts extend."""

    tokens: Int32s = field(default_factory=lambda: np.empty(0, np.int32))
    """Room for tokens; the first `size` are set."""

    size: int = 0
    document: Document = field(default_factory=Document)
    busy: bool = False
    """A session is extending it."""

    saved: int = 0
    """Tokens that were handed to the scope index and the store."""

    def append(self, tokens: Int32s) -> None:
        """Append tokens."""
        if self.size + tokens.size > self.tokens.size:
            larger = np.empty((self.size + tokens.size) * 3 // 2 + 64, np.int32)
            larger[: self.size] = self.tokens[: self.size]
            self.tokens = larger
        self.tokens[self.size : self.size + tokens.size] = tokens
        self.size += tokens.size

    def view(self, start: int = 0) -> Int32s:
        """The tokens from `start` on."""
        return self.tokens[max(start, 0) : self.size]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that a turn added to a history."""

    overlap: Int32s
    """The tokens before them."""

    new: Int32s
    continues: bool
    """They follow what was saved last, or are the first."""

    @property
    def stored(self) -> Int32s:
        """What a store appends: the new tokens, after a boundary and the overlap if they continue something else."""
        if self.continues or not self.new.size:
            return self.new
        return np.concatenate((np.array([BOUNDARY], np.int32), self.overlap, self.new))


MAX_SOURCES = 10_000
"""Trajectories of which a scope knows that it learned from them."""


@dataclass(slots=True, eq=False)
class ScopeHistory:
    """Finished turns of all trajectories of a scope."""

    index: RollingIndex
    lock: Lock = field(default_factory=Lock)
    """Guards every index of the scope, those of its trajectories included."""

    sources: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Ids of the trajectories whose turns it has, or had, the latest last."""

    unlisted: bool = False
    """It has, or had, turns of others too."""

    def learns_from(self, name: str) -> None:
        """Note that a trajectory's turns go into the index."""
        self.sources[name] = None
        self.sources.move_to_end(name)
        if len(self.sources) > MAX_SOURCES:
            self.sources.popitem(last=False)
            self.unlisted = True

    def clear(self, limit: int) -> None:
        """Forget everything. The caller holds the lock."""
        self.index = RollingIndex(limit)
        self.sources.clear()
        self.unlisted = False


class TrajectoryHistory:
    """Conversations of one trajectory, most recently used last, in one index. `scope.lock` guards it."""

    def __init__(self, limit: int, scope: ScopeHistory) -> None:
        self.scope = scope
        self.index = RollingIndex(limit)
        self.conversations: list[Conversation] = []
        self.last_saved: Conversation | None = None
        self.deleted = False
        """Nothing of it is to be kept any more."""

        self.answers: Answers | None = None
        """Of requests that retrieved from them; None as well while one does."""

        self.turns = 0
        self.drafted = 0
        self.accepted = 0
        self.used = time.time()

    @property
    def bytes(self) -> int:
        """Memory of the index, the conversations and the objects around them."""
        answers = self.answers.index.bytes if self.answers is not None else 0
        texts = sum(conversation.tokens.nbytes for conversation in self.conversations)
        return OVERHEAD + self.index.bytes + texts + answers

    def begin(self, prompt: Int32s) -> Conversation:
        """A busy conversation that `prompt` extends; the caller indexes the rest of the prompt."""
        shared, base = 0, None
        for conversation in self.conversations:
            size = common_prefix(prompt, conversation.view())
            if size >= shared:
                shared, base = size, conversation
        if base is None or base.busy or shared < base.size:
            base = self.fork(prompt, shared)
        self.remember(base)
        base.busy = True
        return base

    def resume(self) -> Conversation:
        """A new busy conversation for tokens that a store kept."""
        conversation = Conversation(busy=True)
        self.remember(conversation)
        return conversation

    def fork(self, prompt: Int32s, shared: int) -> Conversation:
        """A new conversation that has the prompt's tokens up to the last one the index knows."""
        stretch = self.index.known(prompt[shared:])
        known = shared + (stretch if stretch >= STRETCH else 0)
        conversation = Conversation(saved=known)
        conversation.append(prompt[:known])
        conversation.document.tail = prompt[max(known - OVERLAP, 0) : known].copy()
        return conversation

    def remember(self, conversation: Conversation) -> None:
        """Make a conversation the most recent one, and forget old ones that no session extends."""
        if conversation in self.conversations:
            self.conversations.remove(conversation)
        idle = [other for other in self.conversations if not other.busy]
        for other in idle[: max(len(self.conversations) + 1 - CONVERSATIONS, 0)]:
            self.conversations.remove(other)
        self.conversations.append(conversation)

    def extend(self, conversation: Conversation, tokens: Int32s) -> None:
        """Append to a conversation and index it."""
        conversation.append(tokens)
        self.index.extend(conversation.document, tokens)

    def save(self, conversation: Conversation) -> "Turn":
        """What was added to a conversation since it was saved last; from now on it counts as saved."""
        start = max(conversation.saved - OVERLAP, 0)
        turn = Turn(
            overlap=conversation.tokens[start : conversation.saved].copy(),
            new=conversation.view(conversation.saved).copy(),
            continues=self.last_saved in (None, conversation),
        )
        conversation.saved = conversation.size
        self.last_saved = conversation
        return turn

    def note(self, outcome: Outcome) -> None:
        """Count what a step verified."""
        self.drafted += len(outcome.proposed) - 1
        self.accepted += len(outcome.accepted)

    def lend_answers(self) -> Answers:
        """The answers so far, for one session that gives them back; new ones while another session has them."""
        answers, self.answers = self.answers, None
        return answers or Answers()

    @property
    def busy(self) -> bool:
        """A session is extending one of the conversations."""
        return any(conversation.busy for conversation in self.conversations)


def documents(stored: Int32s) -> list[Int32s]:
    """The documents of a stored history, oldest first."""
    parts = np.split(stored, np.flatnonzero(stored == BOUNDARY))
    return [part[part != BOUNDARY] for part in parts if (part != BOUNDARY).any()]
