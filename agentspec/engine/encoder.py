"""The model's tokenizer as a grammar library takes it: bytes to the tokens that spell exactly these bytes."""

from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer

from agentspec.engine.text import TokenBytes

MARK = "\x02"
"""Put before a text where the tokenizer would begin every text with a space of its own."""


class PlainEncoder:
    """Encodes text that a grammar forces. Control tokens spelled out in it stay text."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, token_bytes: TokenBytes, vocabulary: int, end_tokens: Collection[int]) -> None:
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = True
        self.tokens = [token_bytes[token] for token in range(vocabulary)]
        """The bytes of every token; none for control tokens and for rows without a token."""

        self.special_token_ids = [token for token, spelled in enumerate(self.tokens) if not spelled]
        self.eos_token_id = min(end_tokens, default=None)
        self.longest = max(map(len, self.tokens), default=0)
        self.ids = {spelled: token for token, spelled in reversed(list(enumerate(self.tokens))) if spelled}

    def __call__(self, text: bytes) -> list[int]:
        """The tokenizer's own tokens where they spell the text as it is, otherwise the longest that do, in order."""
        for mark in ("", MARK):
            tokens = self.encoded(text, mark)
            if b"".join(self.tokens[token] for token in tokens) == text:
                return tokens
        return self.greedy(text)

    def encoded(self, text: bytes, mark: str) -> list[int]:
        """Tokens of the text after a mark, the mark's left out; empty where that cannot be told apart."""
        try:
            tokens: list[int] = self.backend.encode(mark + text.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            return []
        head: list[int] = self.backend.encode(mark, add_special_tokens=False).ids if mark else []
        return tokens[len(head) :] if tokens[: len(head)] == head else []

    def greedy(self, text: bytes) -> list[int]:
        tokens: list[int] = []
        at = 0
        while at < len(text):
            sizes = range(min(self.longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self.ids), 0)
            if not size:
                return tokens
            tokens.append(self.ids[text[at : at + size]])
            at += size
        return tokens
