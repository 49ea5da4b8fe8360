"""Reads server-sent events from bytes that arrive in any pieces."""

import re
from collections.abc import Iterator

from agentspec.errors import ReplayError

LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])", re.DOTALL)
"""A carriage return at the end of what has arrived may be half of a line end, so it is not one yet."""

MAX_EVENT_BYTES = 64 * 1024**2


class EventReader:
    """Gives the data of each event once its closing blank line is there."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The events that `chunk` completes. Text is decoded per event, so a cut inside a character does no harm."""
        self._pending += chunk
        if len(self._pending) > MAX_EVENT_BYTES:
            raise ReplayError(f"the stream has an event of more than {MAX_EVENT_BYTES} bytes")
        start = 0
        try:
            while (end := LINE_END.search(self._pending, start)) is not None:
                line = bytes(self._pending[start : end.start()])
                start = end.end()
                if line:
                    self._line(line)
                elif self._data:
                    yield self._event()
        finally:
            del self._pending[:start]

    def close(self) -> Iterator[str]:
        """The last event, if its blank line ended in a bare carriage return; what is unfinished is dropped."""
        if self._pending == b"\r":
            yield from self.feed(b"\n")

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))

    def _event(self) -> str:
        data = b"\n".join(self._data)
        self._data.clear()
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ReplayError(f"the stream has an event that is not UTF-8: {data[:80]!r}") from error
