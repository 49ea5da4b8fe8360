"""From token ids to text that is never taken back: byte-level decoding, stop strings, minimal hold-back."""

import codecs
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """Inverse of the printable stand-ins that byte-level BPE vocabularies use for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


class TokenBytes:
    """The bytes that each token id stands for; special tokens stand for none."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a fast tokenizer of transformers, byte-level BPE or with byte fallback."""
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        self.byte_level = "ByteLevel" in json.dumps(backend.get("decoder"))
        added = {entry["id"]: entry for entry in backend["added_tokens"]}
        self.bytes: list[bytes] = []
        self.names = {token: entry["content"].encode() for token, entry in added.items() if entry["special"]}
        """Special tokens as they are spelled."""

        for token, piece in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
            if token in added:
                self.bytes.append(b"" if added[token]["special"] else added[token]["content"].encode())
            else:
                self.bytes.append(self._piece_bytes(piece or ""))

    def __getitem__(self, token: int) -> bytes:
        return self.bytes[token] if token < len(self.bytes) else b""

    def _piece_bytes(self, piece: str) -> bytes:
        if self.byte_level:
            table = byte_of_character()
            return bytes(table[character] for character in piece if character in table)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


class TextStream:
    """Text of a growing generation. What `push` and `finish` return, joined, is the text; nothing is sent twice.

    Bytes of a character that is not complete yet are held back, as is the longest tail that could be the start
    of a stop string. Invalid bytes become replacement marks and never stall the stream.
    """

    def __init__(self, token_bytes: TokenBytes | Sequence[bytes], stop: Sequence[str] = ()) -> None:
        self.token_bytes = token_bytes
        self.stop = tuple(stop)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that became final with `token`; sets `stopped` when a stop string is complete."""
        return self._advance(self.decoder.decode(self.token_bytes[token]))

    def finish(self) -> str:
        """The rest, when the generation ends for another reason than a stop string."""
        text = self._advance(self.decoder.decode(b"", final=True))
        if not self.stopped:
            text, self.held = text + self.held, ""
        return text

    def _advance(self, new: str) -> str:
        if self.stopped:
            return ""
        self.held += new
        found = [at for at in (self.held.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped = True
            text, self.held = self.held[: min(found)], ""
            return text
        keep = possible_stop(self.held, self.stop)
        text = self.held[: len(self.held) - keep]
        self.held = self.held[len(self.held) - keep :]
        return text


def possible_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest tail of `text` that is a proper prefix of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > size and stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
