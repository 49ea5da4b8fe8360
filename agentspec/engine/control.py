"""Control tokens that are spelled out in a message stay text: nobody closes a turn by writing `<|im_end|>`."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any


class ControlText:
    """Finds control tokens in texts and cuts them, so that the tokenizer never sees one whole.

    `cut` goes over the values that a chat template is to render, `encode` over what it made of them. Control tokens
    that the template itself writes are not touched.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(names | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self.pattern = re.compile("|".join(re.escape(name) for name in longest_first) or r"(?!)")

    def cut(self, value: Any, mark: str) -> Any:
        """A copy of a JSON value with `mark` after the first character of every control token in its texts."""
        if isinstance(value, str):
            return self.pattern.sub(lambda found: found.group()[:1] + mark + found.group()[1:], value)
        if isinstance(value, Mapping):
            return {self.cut(key, mark): self.cut(entry, mark) for key, entry in value.items()}
        if isinstance(value, Sequence):
            return [self.cut(entry, mark) for entry in value]
        return value

    def encode(self, text: str, mark: str) -> tuple[int, ...]:
        """Token ids of the text without its marks; what stands on either side of one is encoded apart."""
        pieces = text.split(mark)
        return tuple(id for piece in pieces for id in self.tokenizer.encode(piece, add_special_tokens=False))


def new_mark() -> str:
    """A text that no message can hold by guessing and that templates leave as it is."""
    return f"cut{secrets.token_hex(12)}"
