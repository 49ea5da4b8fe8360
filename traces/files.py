"""Reads trace files line by line and writes them whole or not at all."""

import contextlib
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from agentspec.errors import TraceError
from agentspec.traces.schema import Trace, encode_trace, parse_trace


def read_traces(paths: Iterable[Path]) -> Iterator[Trace]:
    """The traces of `.jsonl` and `.jsonl.gz` files, one at a time, all checked.

    Raises `TraceError` that names file and line. Ids are unique over all files, since they name trajectories.
    """
    seen: dict[str, str] = {}
    for where, content in read_lines(paths):
        with located(where):
            trace = parse_trace(content)
            if trace.id in seen:
                raise TraceError(f"the id {trace.id!r:.200} was used before, at {seen[trace.id]}")
        seen[trace.id] = where
        yield trace


def read_lines(paths: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """Place (`file:line`) and JSON value of each line that is not blank."""
    for path in paths:
        number = -1
        try:
            with open_text(path) as file:
                number = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        with located(f"{path}:{number}"):
                            content = json.loads(line, parse_constant=refuse_constant, parse_float=finite)
                        yield f"{path}:{number}", content
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            place = path if number < 0 else f"{path}:{number + 1}"
            raise TraceError(f"{place}: cannot be read: {reason}") from error


def open_text(path: Path) -> io.TextIOWrapper:
    """The text of a file, unpacked when its name ends in `.gz`. Only a newline ends a line."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return path.open("r", encoding="utf-8", newline="\n")


def refuse_constant(name: str) -> None:
    """NaN and infinities are not JSON."""
    raise TraceError(f"{name} is not a JSON value")


def finite(digits: str) -> float:
    """A number that is not too large to be told from infinity."""
    value = float(digits)
    if math.isinf(value):
        raise TraceError(f"the number {digits:.40} is too large")
    return value


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Puts the place before the message of an error about a line."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{where}: {error.message}") from error
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise TraceError(f"{where}: nested too deeply") from error
    except ValueError as error:
        raise TraceError(f"{where}: a number has too many digits") from error


def write_traces(traces: Iterable[Trace], target: Path) -> int:
    """Writes traces to a `.jsonl` or `.jsonl.gz` file; returns their number. On an error the old file stays."""
    if target.is_dir():
        raise TraceError(f"{target}: is a folder; name a file to write")
    part = target.with_name(f".{target.name}.part")
    count = 0
    try:
        with part.open("wb") as plain, packed(plain, target) as file:
            for trace in traces:
                file.write(encode_trace(trace))
                count += 1
        part.replace(target)
    except OSError as error:
        raise TraceError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return count


def packed(plain: BinaryIO, target: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """A writer into `plain`, gzip if the target's name says so; equal traces give equal bytes."""
    if target.suffix == ".gz":
        return cast(contextlib.AbstractContextManager[BinaryIO], gzip.GzipFile("", "wb", fileobj=plain, mtime=0))
    return contextlib.nullcontext(plain)
