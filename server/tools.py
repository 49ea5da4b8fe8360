"""Tool calls in generated text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` as Hermes and Qwen write it.

The parser is fed text that is final, in pieces of any size; what it returns depends on the whole text alone, never
on the cuts. White space around a call belongs to the markup and is dropped. A call that cannot be read is given
back as the plain text it was.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from agentspec.errors import InvalidRequest
from agentspec.server.body import as_object, encodable, refuse_constant

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
OUTSIDE_STRING = re.compile(r'"|</?tool_call>')
IN_STRING = re.compile(r'\\.|"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """One complete call; `arguments` is JSON text of an object."""

    name: str
    arguments: str


class ToolParser:
    """Splits text into plain text and calls."""

    def __init__(self) -> None:
        self._text = ""
        """What was neither returned nor found to be markup yet."""

        self._inside = False
        """Whether an opening marker was read; then `_text` is the body of a call."""

        self._space = ""
        """White space that is dropped if a call follows."""

        self._after_call = False
        """Whether nothing but white space came since the last call."""

        self._scanned: int = 0
        """How much of a call's body needs no second look."""

        self._in_string: bool = False
        """Whether `_scanned` lies inside a JSON string."""

    def feed(self, text: str) -> list[str | Call]:
        """What became certain with `text`, in order."""
        self._text += text
        return self._advance()

    def finish(self) -> list[str | Call]:
        """What was held back. A last call whose closing marker is missing counts if its JSON is complete."""
        found: list[str | Call] = []
        while self._inside:
            found += self._close_at_end()
        found += self._plain(self._text)
        self._text = ""
        if not self._after_call and self._space:
            found.append(self._space)
        self._space = ""
        return found

    def _advance(self) -> list[str | Call]:
        found: list[str | Call] = []
        progress = True
        while progress:
            progress = self._read_body(found) if self._inside else self._read_text(found)
        return found

    def _read_text(self, found: list[str | Call]) -> bool:
        """Takes plain text off the front; True if a call begins."""
        start = self._text.find(OPEN)
        end = start if start >= 0 else len(self._text) - held_back(self._text)
        found += self._plain(self._text[:end])
        self._text = self._text[end:]
        if start < 0:
            return False
        self._begin(self._text.removeprefix(OPEN))
        return True

    def _read_body(self, found: list[str | Call]) -> bool:
        """Takes a call off the front; False while its end is not there."""
        marker = self._find_marker()
        if marker is None:
            return False
        found += self._take_call(marker.start(), marker.end() if marker.group() == CLOSE else marker.start())
        return True

    def _begin(self, text: str) -> None:
        self._text, self._inside = text, True
        self._scanned, self._in_string = 0, False

    def _find_marker(self) -> re.Match[str] | None:
        """The first marker outside JSON strings; an opening one ends a body too. Scans every character once."""
        while True:
            pattern = IN_STRING if self._in_string else OUTSIDE_STRING
            match = pattern.search(self._text, self._scanned)
            if match is None:
                self._scanned = max(self._scanned, len(self._text) - len(CLOSE) + 1)
                return None
            if match.group() in (OPEN, CLOSE):
                return match
            self._scanned = match.end()
            self._in_string ^= match.group() == '"'

    def _close_at_end(self) -> list[str | Call]:
        """Ends the open body where it must end, as nothing more comes."""
        if read_call(self._text) is not None:
            return self._take_call(len(self._text), len(self._text))
        end = self._text.find(CLOSE)
        if end < 0:
            return self._take_call(len(self._text), len(self._text))
        return self._take_call(end, end + len(CLOSE)) + self._advance()

    def _take_call(self, end: int, after: int) -> list[str | Call]:
        call = read_call(self._text[:end])
        raw, self._text = OPEN + self._text[:after], self._text[after:]
        self._inside = False
        if call is None:
            return self._plain(raw)
        self._space, self._after_call = "", True
        return [call]

    def _plain(self, text: str) -> list[str | Call]:
        """The text that may be shown now; white space at its end waits."""
        body = text.rstrip()
        space = text[len(body) :]
        if not body:
            self._space += space
            return []
        shown = (self._space + body).lstrip() if self._after_call else self._space + body
        self._space, self._after_call = space, False
        return [shown]


def held_back(text: str) -> int:
    """Length of the longest end of `text` that could begin an opening marker."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:size]):
            return size
    return 0


def read_call(body: str) -> Call | None:
    """The call in the text between the markers, or None if it is not one."""
    try:
        call = as_object(read_json(body)) or {}
        name, arguments = call.get("name"), call.get("arguments", {})
        fields = as_object(read_json(arguments) if isinstance(arguments, str) else arguments)
        if not isinstance(name, str) or not name or not encodable(name) or fields is None:
            return None
        return Call(name, encode(fields))
    except (ValueError, RecursionError, InvalidRequest):
        return None


def read_json(text: str) -> Any:
    """The value of JSON text, in which strings may have raw line breaks, as models write them."""
    return json.loads(text, strict=False, parse_constant=refuse_constant)


def encode(arguments: dict[str, Any]) -> str:
    """JSON text as chat templates write it, with escapes only where UTF-8 needs them."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text if encodable(text) else json.dumps(arguments, allow_nan=False)
