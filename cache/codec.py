"""How a history is written down: the names of its keys, and its tokens in linked chunks.

A chunk is `version, width, id, previous, count, checksum` and `count` little-endian unsigned numbers of `width` bytes,
each a token plus 1, so that a boundary is 0. `previous` is the id of the chunk that its tokens continue; where that one
is missing, damaged or not the one before, a reader puts a `BOUNDARY`, so that tokens that were never adjacent never
look it. The checksum covers the trajectory's name too: a chunk is read under no other name than it was written for.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.history import BOUNDARY
from agentspec.types import Scope, Trajectory

VERSION = 2
HEADER = struct.Struct("<BBQQII")

CHUNK_TOKENS = 4096
"""Most tokens of a chunk, which is so at most 16 KiB and a header."""

MOST = int(np.iinfo(np.int32).max)
"""The largest token."""

MAX_NAME = 512
"""Longest tenant, model or trajectory name in a key, in bytes after escaping."""


def escape(name: str) -> str:
    """A name without `:`, `{` and `}`, so that joined names stay apart; different names stay different."""
    return quote(name, safe="", errors="surrogatepass")


def names_of(trajectory: Trajectory) -> list[bytes]:
    """The three names of a trajectory in UTF-8, as a history file has them."""
    scope = trajectory.scope
    return [name.encode("utf-8", "surrogatepass") for name in (scope.tenant, scope.model, trajectory.id)]


def tag_of(trajectory: Trajectory) -> str:
    """The full name of a trajectory: no other one has it."""
    scope = trajectory.scope
    return ":".join(escape(name) for name in (scope.tenant, scope.model, trajectory.id))


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of a trajectory's keys; all share one hash tag, so they live in one cluster slot."""

    tokens: str
    meta: str
    gone: str

    @staticmethod
    def of(trajectory: Trajectory) -> "Keys":
        """The keys of a trajectory."""
        tag = tag_of(trajectory)
        return Keys(*(f"as:{{{tag}}}:{part}" for part in ("tok", "meta", "gone")))


@dataclass(frozen=True, slots=True)
class ScopeKeys:
    """Names of a scope's keys, in one cluster slot too."""

    recent: str
    sizes: str
    gone: str

    @staticmethod
    def of(scope: Scope) -> "ScopeKeys":
        """The keys of a scope."""
        tag = f"{escape(scope.tenant)}:{escape(scope.model)}"
        return ScopeKeys(*(f"as:{{{tag}}}:{part}" for part in ("recent", "sizes", "gone")))


def named_by(key: str) -> Trajectory | None:
    """The trajectory whose tokens a key holds; None for any other key."""
    if not (key.startswith("as:{") and key.endswith("}:tok")):
        return None
    parts = [unquote(part, errors="surrogatepass") for part in key[4:-5].split(":")]
    if len(parts) != 3:
        return None
    found = Trajectory(parts[2], Scope(parts[0], parts[1]))
    return found if Keys.of(found).tokens == key else None


def digest_of(trajectory: Trajectory) -> str:
    """What is left of a deleted trajectory's name for a while, to tell the other processes: a hash of 32 digits."""
    return hashlib.blake2b(tag_of(trajectory).encode(), digest_size=16).hexdigest()


def storable(trajectory: Trajectory) -> bool:
    """Whether the names are text that is short enough for a key."""
    names = (trajectory.scope.tenant, trajectory.scope.model, trajectory.id)
    try:
        return all(name.encode() is not None and len(escape(name)) <= MAX_NAME for name in names)
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, slots=True)
class Chunk:
    """A readable chunk."""

    id: int
    previous: int
    tokens: Int32s


def packed(tokens: Int32s) -> tuple[int, bytes]:
    """Bytes of each number, and the numbers."""
    numbers = tokens.astype("<i8") + 1
    largest = int(numbers.max(initial=0))
    width = 2 if largest < 1 << 16 else 3 if largest < 1 << 24 else 4
    return width, numbers.view(np.uint8).reshape(-1, 8)[:, :width].tobytes()


def unpacked(width: int, body: bytes) -> Int32s | None:
    """The tokens of packed numbers; None where one is none."""
    numbers = np.zeros((len(body) // width, 8), np.uint8)
    numbers[:, :width] = np.frombuffer(body, np.uint8).reshape(-1, width)
    tokens = numbers.reshape(-1).view("<i8") - 1
    return tokens.astype(np.int32) if tokens.max(initial=0) <= MOST else None


def checksum(trajectory: Trajectory, chunk: tuple[int, int, int], body: bytes) -> int:
    """Of the width, the id and the id before, and the numbers of a chunk, for a trajectory."""
    return zlib.crc32(body, zlib.crc32(repr(chunk).encode(), zlib.crc32(tag_of(trajectory).encode())))


def pack(trajectory: Trajectory, chunk: Chunk) -> bytes:
    """The bytes of a chunk of a trajectory."""
    width, body = packed(chunk.tokens)
    check = checksum(trajectory, (width, chunk.id, chunk.previous), body)
    return HEADER.pack(VERSION, width, chunk.id, chunk.previous, chunk.tokens.size, check) + body


def unpack(trajectory: Trajectory, data: bytes) -> Chunk | None:
    """The chunk of some bytes; None when they are damaged, no tokens, of another version or another trajectory's."""
    if len(data) < HEADER.size:
        return None
    version, width, identity, previous, count, check = HEADER.unpack_from(data)
    body = data[HEADER.size :]
    if version != VERSION or not 2 <= width <= 4 or len(body) != width * count:
        return None
    if checksum(trajectory, (width, identity, previous), body) != check:
        return None
    tokens = unpacked(width, body)
    return None if tokens is None else Chunk(identity, previous, tokens)


def identity_of(data: bytes) -> bytes:
    """The id in a chunk's header, as bytes; empty where there is no header."""
    return data[2:10] if len(data) >= HEADER.size else b""


def newer(data: bytes) -> bool:
    """Whether a later version than this one wrote a chunk."""
    return bool(data) and data[0] > VERSION


def join(chunks: Iterable[Chunk]) -> Int32s:
    """The tokens of chunks in stored order, each chunk once, with a boundary where one does not continue the last."""
    parts, known = list[Int32s](), set[int]()
    boundary, last = np.array([BOUNDARY], np.int32), 0
    for chunk in chunks:
        if chunk.id in known:
            continue
        known.add(chunk.id)
        if parts and chunk.previous != last:
            parts.append(boundary)
        parts.append(chunk.tokens)
        last = chunk.id
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
