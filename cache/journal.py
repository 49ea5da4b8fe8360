"""A file of histories that only grows: checked records in the order in which they were written.

The file begins with `MAGIC` and a version. A record is the size and the CRC-32 of its payload and the payload: `HEAD`,
three names in UTF-8 and `count` tokens as in `codec`. Reading ends at the first record that is not whole.
"""

import errno
import logging
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from agentspec.cache import damaged
from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import CHUNK_TOKENS, names_of, packed, unpacked
from agentspec.errors import ConfigError
from agentspec.types import Scope, Trajectory

log = logging.getLogger(__name__)

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
        names = names_of(trajectory)
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
    names, start = list[str](), HEAD.size
    try:
        for length in lengths:
            names.append(payload[start : start + length].decode("utf-8", "surrogatepass"))
            start += length
    except UnicodeDecodeError:
        return None
    tokens = unpacked(width, payload[at:])
    return None if tokens is None else Record(Trajectory(names[2], Scope(names[0], names[1])), tokens, turns, updated)


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


def file_at(setting: str) -> Path:
    """The path that the setting names. Raises `ConfigError` for one that no file can have."""
    try:
        if "\0" in setting:
            raise ValueError("a path has no NUL character")
        return Path(setting).expanduser()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{SETTING}: {setting!r} is no path: {error}") from None


def check_kind(path: Path) -> None:
    """Raises `OSError` for what is there and no plain file: to open a pipe would wait for its other end."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))


class Journal:
    """The file, open for writing by this process alone. A symbolic link is followed once, here."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.lock = FileLock(f"{self.path}.lock", timeout=0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            check_kind(self.path)
            os.close(os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            self.lock.acquire()
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            self.make_ours()
        except Timeout:
            raise ConfigError(f"{SETTING}: {str(path)!r} is in use by another process") from None
        except OSError as error:
            self.lock.release()
            place = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
            why = f"{error.strerror or error}{place}"
            raise ConfigError(f"{SETTING}: cannot open {str(path)!r}: {why}") from None
        self.size = os.fstat(self.file).st_size

    def make_ours(self) -> None:
        """Let nobody else read the file; raises `OSError` where deleted text would stay under another name of it."""
        found = os.fstat(self.file)
        if found.st_nlink > 1:
            os.close(self.file)
            raise OSError(errno.EMLINK, "it has another name too (a hard link), under which deleted text would stay")
        if found.st_mode & 0o077:
            log.warning("%s could be read by others than its owner; it is made 0600", self.path)
            with suppress(OSError):
                os.fchmod(self.file, 0o600)
        self.unfinished.unlink(missing_ok=True)

    @property
    def unfinished(self) -> Path:
        """Where the file is written anew before it takes the place of the old one."""
        return self.path.with_name(f"{self.path.name}.new")

    def contents(self) -> bytes:
        """All bytes of the file."""
        with open(self.file, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

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
        new = self.unfinished
        new.unlink(missing_ok=True)
        file, size = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600), 0
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
        settle(self.path.parent)

    def put_aside(self) -> Path:
        """Keep the file as it is under another name, and begin a new one; that name."""
        aside = damaged.fresh(self.path)
        os.replace(self.path, aside)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        os.close(self.file)
        self.file, self.size = file, 0
        self.write(START)
        return aside

    def close(self) -> None:
        """Let another process have the file."""
        os.close(self.file)
        self.lock.release()


def settle(folder: Path) -> None:
    """Wait until the disk has the names in a folder, where it can: no crash brings a replaced file back."""
    file = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(file)
    os.close(file)


def in_parts(records: Iterable[tuple[Trajectory, Int32s, int, float]]) -> Iterator[bytes]:
    """The bytes of trajectories, one after the other."""
    for trajectory, tokens, turns, updated in records:
        yield encode(trajectory, tokens, turns, updated)


def no_space(error: OSError) -> bool:
    """Whether a disk, or what this process may use of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
