"""How a history is written down: the names of its keys, and its tokens in linked chunks.

A chunk is `version, id, previous, count, checksum` and `count` little-endian int32 tokens. `previous` is the id of
the chunk that its tokens continue; where that one is missing, damaged or not the one before, a reader puts a
`BOUNDARY`, so that tokens that were never adjacent never look it.
"""

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.history import BOUNDARY
from agentspec.types import Scope, Trajectory

VERSION = 1
HEADER = struct.Struct("<BQQII")

CHUNK_TOKENS = 4096
"""Most tokens of a chunk, which is so at most 16 KiB and a header."""

MAX_NAME = 512
"""Longest tenant, model or trajectory name in a key, in bytes after escaping."""


def escape(name: str) -> str:
    """A name without `:`, `{` and `}`, so that joined names stay apart; different names stay different."""
    return quote(name, safe="", errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of a trajectory's keys; all share one hash tag, so they live in one cluster slot."""

    tokens: str
    meta: str

    @staticmethod
    def of(trajectory: Trajectory) -> "Keys":
        """The keys of a trajectory."""
        scope = trajectory.scope
        tag = ":".join(escape(name) for name in (scope.tenant, scope.model, trajectory.id))
        return Keys(f"as:{{{tag}}}:tok", f"as:{{{tag}}}:meta")


def recent_key(scope: Scope) -> str:
    """The key of a scope's recent trajectories."""
    return f"as:{{{escape(scope.tenant)}:{escape(scope.model)}}}:recent"


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


def pack(chunk: Chunk) -> bytes:
    """The bytes of a chunk."""
    body = chunk.tokens.astype("<i4").tobytes()
    return HEADER.pack(VERSION, chunk.id, chunk.previous, chunk.tokens.size, zlib.crc32(body)) + body


def unpack(data: bytes) -> Chunk | None:
    """The chunk of some bytes; None when they are damaged or of another version."""
    if len(data) < HEADER.size:
        return None
    version, identity, previous, count, checksum = HEADER.unpack_from(data)
    body = data[HEADER.size :]
    if version != VERSION or len(body) != 4 * count or zlib.crc32(body) != checksum:
        return None
    return Chunk(identity, previous, np.frombuffer(body, "<i4").astype(np.int32))


def join(chunks: Iterable[Chunk]) -> Int32s:
    """The tokens of chunks in stored order, each chunk once, with a boundary where one does not continue the last."""
    parts: list[Int32s] = []
    boundary, last = np.array([BOUNDARY], np.int32), 0
    for chunk in chunks:
        if chunk.id == last:
            continue
        if parts and chunk.previous != last:
            parts.append(boundary)
        parts.append(chunk.tokens)
        last = chunk.id
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
