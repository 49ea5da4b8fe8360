"""Histories as lines of JSON, to be carried from one store to another; docs/format/histories.md describes them."""

import base64
import binascii
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import storable
from agentspec.cache.history import BOUNDARY
from agentspec.cache.inventory import Kept
from agentspec.errors import StoreError
from agentspec.types import Scope, Trajectory

FORMAT = "agentspec-histories"
VERSION = 1
MOST_TOKENS = 1 << 26


def lines(kept: Iterable[Kept]) -> Iterator[str]:
    """The lines of a file: what it is, a line for each trajectory, and their number."""
    yield json.dumps({"format": FORMAT, "version": VERSION})
    count = 0
    for one in kept:
        yield json.dumps(exported(one))
        count += 1
    yield json.dumps({"trajectories": count})


def exported(kept: Kept) -> dict[str, Any]:
    """A trajectory as an object."""
    data = kept.tokens.astype("<i4").tobytes()
    return {
        "tenant": kept.trajectory.scope.tenant,
        "model": kept.trajectory.scope.model,
        "id": kept.trajectory.id,
        "turns": kept.turns,
        "updated": kept.updated,
        "tokens": int(kept.tokens.size),
        "crc32": zlib.crc32(data),
        "data": base64.b64encode(zlib.compress(data)).decode(),
    }


def read_lines(path: Path) -> list[tuple[Trajectory, Int32s]]:
    """The trajectories of a file, which is read once: it may be a pipe. Raises `StoreError` that names the line for one
    that is not whole or not right."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise StoreError(f"{path} is neither a plain file nor a pipe")
            return list(checked(path, file))
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise StoreError(f"{path} is no text") from None


def checked(path: Path, file: Iterable[str]) -> Iterator[tuple[Trajectory, Int32s]]:
    """The trajectories of a file's lines."""
    count, ended = 0, False
    for number, line in enumerate(file, start=1):
        try:
            value = json.loads(line)
            if number == 1:
                check_header(value)
            elif ended:
                raise ValueError("nothing may follow the number of trajectories")
            elif "trajectories" in value:
                ended = True
                if value["trajectories"] != count:
                    raise ValueError(f"{count} trajectories came before it")
            else:
                yield imported(value)
                count += 1
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error, binascii.Error) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise StoreError(f"{path}, line {number}: {what:.200}") from None
    if not ended:
        raise StoreError(f"{path} ends before its last line: it was not written to its end")


def check_header(value: Any) -> None:
    """Raises `ValueError` for a first line of another kind of file."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError("this is no export of histories")
    if value.get("version") != VERSION:
        raise ValueError(f"version {value.get('version')} is not known, {VERSION} is")


def imported(value: dict[str, Any]) -> tuple[Trajectory, Int32s]:
    """The trajectory of an object; raises `ValueError`, `KeyError` or `TypeError` for one that is not right."""
    names = [value["tenant"], value["model"], value["id"]]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError("tenant, model and id must be texts")
    trajectory = Trajectory(names[2], Scope(names[0], names[1]))
    count = value["tokens"]
    if not storable(trajectory) or type(count) is not int or not 0 < count <= MOST_TOKENS:
        raise ValueError("the names are too long, or the number of tokens is out of bounds")
    data = zlib.decompressobj().decompress(base64.b64decode(value["data"], validate=True), 4 * count + 1)
    if len(data) != 4 * count or zlib.crc32(data) != value["crc32"]:
        raise ValueError("the tokens are damaged")
    tokens = np.frombuffer(data, "<i4").astype(np.int32)
    if tokens.min() < BOUNDARY:
        raise ValueError("tokens are not negative")
    return trajectory, tokens
