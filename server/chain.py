"""Recognises conversations that carry no id, by the messages they have in common.

Every prefix of a conversation has a digest: that of the prefix one message shorter, hashed with the next message.
The digests of all requests are remembered with the trajectory that first sent them.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_PREFIXES = 100_000
"""Prefixes remembered; the least recently used are forgotten. About 200 bytes each."""


@dataclass(slots=True)
class Prefix:
    """A remembered beginning of a conversation."""

    owner: str
    tip: bool
    """Whether it is the whole of its owner's latest request."""


@dataclass(frozen=True, slots=True)
class Match:
    """The trajectory that owns the longest known prefix of a request."""

    owner: str
    continues: bool
    """Whether the prefix is all that its owner has sent so far; else the request is a fork."""


class Chain:
    """Least recently used memory of prefixes."""

    def __init__(self, capacity: int = MAX_PREFIXES) -> None:
        self._capacity = capacity
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, digests: Sequence[bytes]) -> Match | None:
        """Who owns the longest known prefix, or None if no prefix is known."""
        for digest in reversed(digests):
            prefix = self._prefixes.get(digest)
            if prefix is not None:
                return Match(prefix.owner, prefix.tip)
        return None

    def learn(self, digests: Sequence[bytes], owner: str, final: bool = False) -> None:
        """Remembers a request of `owner`; prefixes others sent first stay theirs. Nothing continues a final one."""
        for position, digest in enumerate(digests, start=1):
            prefix = self._prefixes.setdefault(digest, Prefix(owner, tip=False))
            self._prefixes.move_to_end(digest)
            if prefix.owner == owner:
                prefix.tip = position == len(digests) and not final
        while len(self._prefixes) > self._capacity:
            self._prefixes.popitem(last=False)

    def forget(self, owner: str) -> list[bytes]:
        """Forgets all that a trajectory sent first; the digests that it was."""
        gone = [digest for digest, prefix in self._prefixes.items() if prefix.owner == owner]
        for digest in gone:
            del self._prefixes[digest]
        return gone


def prefix_digests(
    namespace: Sequence[str], tools: Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> list[bytes]:
    """Digests of all prefixes that hold more than system messages, shortest first.

    Nothing matches across namespaces or across different tools.
    """
    state = digest(b"", json.dumps([list(namespace), tools]))
    digests: list[bytes] = []
    for message in messages:
        state = digest(state, json.dumps(message))
        if digests or message["role"] != "system":
            digests.append(state)
    return digests


def digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
