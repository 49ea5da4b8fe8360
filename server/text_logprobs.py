"""Log-probabilities in the form of text completions: parallel lists, and where in the text each token begins."""

import codecs
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.server.answer import LEAST
from agentspec.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of a text."""

    token: str
    logprob: float | None
    """None for the first token of a prompt, which follows nothing."""

    top: dict[str, float] | None
    """The token and the likeliest ones in its place."""

    offset: int
    """Characters of the text before the token; a token inside a character begins where that does."""


class Speller:
    """Spells the tokens of one text in order, and counts its characters."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], control_tokens: Collection[int], characters: int = 0
    ) -> None:
        self.token_bytes = token_bytes
        self._control_tokens = control_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = characters

    def at(self, characters: int) -> "Speller":
        """One for a text before which so many characters stand."""
        return Speller(self.token_bytes, self._control_tokens, characters)

    def spelled(self, token: int) -> str:
        """A token by itself; as the API has always had it, `bytes:` and numbers where it is no text."""
        spelled = self.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def entry(self, one: TokenLogprob, top: int) -> Entry:
        """The next token of a completion, with the `top` likeliest. Control tokens give no text."""
        text = b"" if one.token in self._control_tokens else self.token_bytes(one.token)
        return Entry(self.spelled(one.token), max(one.logprob, LEAST), self.likeliest(one, top), self.advance(text))

    def likeliest(self, one: TokenLogprob, top: int) -> dict[str, float]:
        """Tokens that are spelled alike count as the likeliest of them."""
        found: dict[str, float] = {}
        for token, logprob in sorted([*one.top[:top], (one.token, one.logprob)], key=lambda pair: -pair[1]):
            found.setdefault(self.spelled(token), max(logprob, LEAST))
        return found

    def advance(self, text: bytes) -> int:
        """Characters before the next piece of the text."""
        before = self._characters
        self._characters += len(self._decoder.decode(text))
        return before


def prompt_entries(
    speller: Speller, text: bytes, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], top: int
) -> list[Entry]:
    """The tokens of a prompt that reads `text`; `logprobs` are those of all but the first."""
    counter = speller.at(0)
    offsets = [counter.advance(piece) for piece in pieces_of(text, map(speller.token_bytes, tokens))]
    entries = [Entry(speller.spelled(tokens[0]), None, None, offsets[0])]
    for one, offset in zip(logprobs, offsets[1:], strict=True):
        entries.append(Entry(speller.spelled(one.token), max(one.logprob, LEAST), speller.likeliest(one, top), offset))
    return entries


def pieces_of(text: bytes, spelled: Iterable[bytes]) -> Iterator[bytes]:
    """The piece of a text that each token stands for: empty for one that the tokenizer put there by itself, or that is
    spelled differently. A tokenizer may also have put a space before the text."""
    at = 0
    for token in spelled:
        piece = next((one for one in (token, token.removeprefix(b" ")) if text.startswith(one, at)), b"")
        at += len(piece)
        yield piece


def text_logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    """OpenAI's parallel lists."""
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.top for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }
