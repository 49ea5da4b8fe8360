"""A file of histories that only grows: checked records in the order in which they were written.

The file begins with `MAGIC` and a version. A record is the size and the CRC-32 of its payload and the payload: `HEAD`,
three names in UTF-8 and `count` tokens as in `codec`. Reading ends at the first record that is not whole.
"""

import errno
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import CHUNK_TOKENS, packed, unpacked
from agentspec.errors import ConfigError
from agentspec.types import Scope, Trajectory

SETTING = "AGENTSPEC_CACHE_HISTORY_FILE"
MAGIC = b"AgentSpec\x00"
VERSION = 1
START = MAGIC + struct.pack("<H", VERSION)
FRAME = struct.Struct("<II")
HEAD = struct.Struct("<dIIBHHH")
"""Time of the write in seconds since 1970, turns, count of tokens, bytes of a token, bytes of each name."""


@dataclass(frozen=True, slots=True)
class Record:
    """Tokens that were added to a trajectory."""

    trajectory: Trajectory
    tokens: Int32s
    turns: int
    """Turns that begin with them; 0 where they go on with the one of the record before."""

    updated: float


@dataclass(frozen=True, slots=True)
class Found:
    """The readable beginning of a file."""

    records: list[Record]
    end: int
    """Bytes of it."""

    size: int
    torn: bool
    """What follows, if anything does, is the beginning of a record: a write that was interrupted."""

    @property
    def whole(self) -> bool:
        """Whether nothing follows."""
        return self.end == self.size


def encode(trajectory: Trajectory, tokens: Int32s, turns: int, updated: float) -> bytes:
    """The records of tokens that are added to a trajectory."""
    parts = []
    for start in range(0, tokens.size, CHUNK_TOKENS):
        part = tokens[start : start + CHUNK_TOKENS]
        scope = trajectory.scope
        names = [name.encode("utf-8", "surrogatepass") for name in (scope.tenant, scope.model, trajectory.id)]
        width, body = packed(part)
        head = HEAD.pack(updated, 0 if start else turns, part.size, width, *map(len, names))
        payload = b"".join((head, *names, body))
        parts.append(FRAME.pack(len(payload), zlib.crc32(payload)) + payload)
    return b"".join(parts)


def decode(payload: bytes) -> Record | None:
    """The record of a payload; None where it is none."""
    if len(payload) < HEAD.size:
        return None
    updated, turns, count, width, *lengths = HEAD.unpack_from(payload)
    at = HEAD.size + sum(lengths)
    if not 2 <= width <= 4 or len(payload) != at + width * count:
        return None
    names, start = [], HEAD.size
    for length in lengths:
        names.append(payload[start : start + length].decode("utf-8", "surrogatepass"))
        start += length
    return Record(Trajectory(names[2], Scope(names[0], names[1])), unpacked(width, payload[at:]), turns, updated)


def read(data: bytes) -> Found:
    """What a file's bytes hold. Raises `ConfigError` for a file of a later version, `ValueError` for another file."""
    if not data.startswith(START):
        if START.startswith(data):
            return Found([], 0, len(data), torn=True)
        if data.startswith(MAGIC) and len(data) >= len(START):
            version = int.from_bytes(data[len(MAGIC) : len(START)], "little")
            raise ConfigError(f"{SETTING}: the file is of version {version}, this AgentSpec reads {VERSION}")
        raise ValueError("not a file of histories")
    records, at = list[Record](), len(START)
    while at + FRAME.size <= len(data):
        size, check = FRAME.unpack_from(data, at)
        stop = at + FRAME.size + size
        payload = data[at + FRAME.size : stop]
        record = decode(payload) if zlib.crc32(payload) == check and stop <= len(data) else None
        if record is None:
            torn = stop >= len(data) or not any(data[at:])
            return Found(records, at, len(data), torn)
        records.append(record)
        at = stop
    return Found(records, at, len(data), torn=True)


def check_kind(path: Path) -> None:
    """Raises `OSError` for what is there and no plain file: to open a pipe would wait for its other end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no plain file", str(path))


class Journal:
    """The file, open for writing by this process alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = FileLock(f"{path}.lock", timeout=0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.lock.acquire()
            check_kind(path)
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except Timeout:
            raise ConfigError(f"{SETTING}: {str(path)!r} is in use by another process") from None
        except OSError as error:
            self.lock.release()
            raise ConfigError(f"{SETTING}: cannot open {str(path)!r}: {error.strerror or error}") from None
        self.size = os.fstat(self.file).st_size

    def contents(self) -> bytes:
        """All bytes of the file."""
        return self.path.read_bytes()

    def cut(self, size: int) -> None:
        """Keep the first bytes only, at least what a file begins with."""
        os.ftruncate(self.file, size)
        self.size = size
        if size < len(START):
            os.ftruncate(self.file, 0)
            self.size = 0
            self.write(START)

    def write(self, data: bytes) -> None:
        """Append, and wait for the disk. Where that fails nothing of it stays, and `OSError` is raised."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.file, view) :]
            os.fsync(self.file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.file, self.size)
            raise
        self.size += len(data)

    def rewrite(self, parts: Iterable[bytes]) -> None:
        """Replace all records at once. Where that fails everything is as before, and `OSError` is raised."""
        new = self.path.with_name(f"{self.path.name}.new")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        file, size = os.open(new, flags, 0o600), 0
        try:
            for part in (START, *parts):
                size += len(part)
                view = memoryview(part)
                while view:
                    view = view[os.write(file, view) :]
            os.fsync(file)
            os.replace(new, self.path)
        except OSError:
            os.close(file)
            with suppress(OSError):
                new.unlink()
            raise
        os.close(self.file)
        self.file, self.size = file, size

    def put_aside(self) -> Path:
        """Keep the file as it is under another name, and begin a new one; that name."""
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        os.replace(self.path, aside)
        os.close(self.file)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.size = 0
        self.write(START)
        return aside

    def close(self) -> None:
        """Let another process have the file."""
        os.close(self.file)
        self.lock.release()


def in_parts(records: Iterable[tuple[Trajectory, Int32s, int, float]]) -> Iterator[bytes]:
    """The bytes of trajectories, one after the other."""
    for trajectory, tokens, turns, updated in records:
        yield encode(trajectory, tokens, turns, updated)


def no_space(error: OSError) -> bool:
    """Whether a disk, or what this process may use of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
