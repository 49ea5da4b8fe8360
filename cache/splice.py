"""Puts the tokens that were generated in the place of those that their text gives when it is tokenised again.

A prompt is cut at its control tokens, which no tokenizer joins with text. A stretch between two of them is replaced
only where all tokens before it are those that a reply followed, and its bytes are those of the reply as the client got
it: what a prompt says never changes, nor which control tokens it has.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.automaton import Int32s
from agentspec.cache.replies import Known, Reply

NOTHING = np.empty(0, np.int32)


class Spelling(Protocol):
    """The bytes of each token; none for a control token."""

    def __getitem__(self, token: int, /) -> bytes: ...


class Return(StrEnum):
    """How an answer came back in a later prompt."""

    IDENTICAL = "identical"
    """Tokenised again, its text gives the tokens that were generated."""

    SPLICED = "spliced"
    """It gives others, which were replaced."""

    SPACE = "changed_space"
    """Its text differs in white space."""

    PART = "changed_part"
    """Only a part of its text came back, as where a template leaves reasoning out."""

    OTHER = "changed_other"
    """Its text differs otherwise."""


@dataclass(slots=True)
class Spliced:
    """A prompt with the tokens that were generated."""

    tokens: Int32s = field(default_factory=lambda: NOTHING)
    first: int | None = None
    """The first position at which it differs from the prompt as it was tokenised; None where it does not."""

    replaced: int = 0
    """Tokens that were put in."""

    answers: int = 0
    """Answers that were put in."""

    returns: list[Return] = field(default_factory=list)
    """Of answers that came back for the first time."""


class Splicer:
    """Splices prompts of one tokenizer. Changes nothing but whether a reply was counted."""

    def __init__(self, spelling: Spelling, vocabulary: int) -> None:
        self.spelling = spelling
        self.control: NDArray[np.bool_] = np.array([not spelling[token] for token in range(vocabulary)], bool)
        """Which tokens stand for no text."""

    def text(self, tokens: Int32s) -> bytes:
        """What tokens spell."""
        return b"".join(self.spelling[token] for token in tokens.tolist())

    def reply(self, prompt: Int32s, answer: Int32s, size: int, *, broken_off: bool = False) -> tuple[bytes, Reply]:
        """The digest of the tokens before a reply, and the reply: `answer` to `prompt`, of which a client got `size`
        bytes of text."""
        controls = np.flatnonzero(self.control[prompt])
        start = int(controls[-1]) + 1 if controls.size else 0
        ends = np.flatnonzero(self.control[answer])
        asked = prompt[start:]
        tokens = np.concatenate((asked, answer[: ends[0]] if ends.size else answer))
        spelled = len(self.text(asked))
        return digest(prompt[:start]), Reply(tokens, spelled, spelled + size, broken_off)

    def splice(self, prompt: Int32s, known: Sequence[Known]) -> Spliced:
        """The prompt with all replies that come back in it."""
        result, state, pieces, size = Spliced(), hashlib.blake2b(digest_size=16), list[Int32s](), 0
        for rendered, end in self._stretches(prompt):
            found = rendered
            if end.size:
                key = state.copy().digest()
                replies = [reply for of_one in known for reply in of_one.get(key, ())]
                found = self._returned(rendered, replies, result) if replies else rendered
            if found is not rendered and result.first is None:
                same = min(found.size, rendered.size)
                different = np.flatnonzero(found[:same] != rendered[:same])
                result.first = size + (int(different[0]) if different.size else same)
            for piece in (found, end):
                state.update(piece.tobytes())
                pieces.append(piece)
                size += piece.size
        result.tokens = np.concatenate(pieces) if pieces else prompt
        return result

    def stored(self, document: Int32s, tokenize: Callable[[str], Sequence[int]]) -> Iterator[tuple[bytes, Reply]]:
        """Replies that a stored conversation may hold: its stretches that are not what their text gives when it is
        tokenised again. They count as counted."""
        state = hashlib.blake2b(digest_size=16)
        for stretch, end in self._stretches(document):
            text = self.text(stretch)
            if stretch.size and list(tokenize(text.decode(errors="replace"))) != stretch.tolist():
                yield state.copy().digest(), Reply(stretch.copy(), 0, len(text), counted=True)
            state.update(stretch.tobytes())
            state.update(end.tobytes())

    def _stretches(self, tokens: Int32s) -> Iterator[tuple[Int32s, Int32s]]:
        """The texts between control tokens, each with the control token after it; nothing after the last one."""
        start = 0
        for at in np.flatnonzero(self.control[tokens]).tolist():
            yield tokens[start:at], tokens[at : at + 1]
            start = at + 1
        yield tokens[start:], NOTHING

    def _returned(self, rendered: Int32s, replies: Sequence[Reply], result: Spliced) -> Int32s:
        """The tokens of a stretch that stands where `replies` stood: `rendered` itself where nothing is put in."""
        text = self.text(rendered)
        texts = [self.text(reply.tokens) for reply in replies]
        fitting = [reply for reply, said in zip(replies, texts, strict=True) if fits(reply, said, text)]
        if not fitting:
            last, said = replies[-1], texts[-1]
            if not last.counted and text.startswith(said[: last.asked]):
                last.counted = True
                result.returns.append(change(text[last.asked :], said[last.asked :]))
            return rendered
        made = [self._joined(reply.tokens, rendered, len(text)) for reply in fitting]
        same = [reply for reply, tokens in zip(fitting, made, strict=True) if np.array_equal(tokens, rendered)]
        chosen = same[0] if same else fitting[0]
        if not chosen.counted:
            chosen.counted = True
            result.returns.append(Return.IDENTICAL if same else Return.SPLICED)
        if same:
            return rendered
        result.answers += 1
        result.replaced += made[0].size
        return made[0]

    def _joined(self, generated: Int32s, rendered: Int32s, size: int) -> Int32s:
        """A text of `size` bytes in the tokens that were generated, as far as they end where one of `rendered` ends: a
        stop string may end in the middle of a token."""
        ends = [np.cumsum([len(self.spelling[token]) for token in tokens.tolist()]) for tokens in (generated, rendered)]
        common = np.intersect1d(ends[0][ends[0] <= size], ends[1])
        last = int(common[-1]) if common.size else 0
        taken, left = (int(np.searchsorted(of_one, last, "right")) for of_one in ends)
        return np.concatenate((generated[:taken], rendered[left:]))


def digest(tokens: Int32s) -> bytes:
    """Equal for equal tokens alone."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def fits(reply: Reply, said: bytes, text: bytes) -> bool:
    """Whether a text is that of a reply as the client got it; `said` is what the reply's tokens spell."""
    least = reply.asked if reply.broken_off else reply.size
    return least <= len(text) <= reply.size and said[: len(text)] == text


def change(text: bytes, said: bytes) -> Return:
    """How a text that came back differs from what was said."""
    if b"".join(text.split()) == b"".join(said.split()):
        return Return.SPACE
    return Return.PART if text.strip() in said else Return.OTHER
