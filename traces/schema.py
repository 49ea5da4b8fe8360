"""The record of one agent run: one JSON object a line, described in `docs/format/trace.md`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentspec.errors import TraceError
from agentspec.traces.messages import Message, check_messages

NAMES = ("id", "source", "domain")
OPTIONAL_NAMES = ("model", "group")
FIELDS = frozenset((*NAMES, *OPTIONAL_NAMES, "messages", "tools", "meta"))


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn to generate again."""

    trace: "Trace"
    index: int
    """Index of the recorded turn in the trace's messages."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The recorded messages before the turn."""
        return self.trace.messages[: self.index]


@dataclass(frozen=True, slots=True)
class Trace:
    """One agent run as it was recorded."""

    id: str
    source: str
    domain: str
    messages: tuple[Message, ...]
    model: str | None = None
    """Model that wrote the assistant turns, if known."""

    group: str | None = None
    """Task or session; trials of the same task share it."""

    tools: tuple[Mapping[str, Any], ...] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generated(self) -> tuple[int, ...]:
        """Indices of the assistant messages that the model generated in this record; the others are context."""
        indices = self.meta.get("generated")
        if indices is not None:
            return tuple(indices)
        return tuple(index for index, message in enumerate(self.messages) if message["role"] == "assistant")

    def turns(self) -> Iterator[Turn]:
        """The generated turns in order; one without any message before it has no prompt and is left out."""
        return (Turn(self, index) for index in self.generated if index > 0)


def parse_trace(content: Any) -> Trace:
    """The trace in a JSON value; raises `TraceError` that names the first wrong field."""
    if not isinstance(content, dict):
        raise TraceError("a trace must be a JSON object")
    unknown = sorted(set(content) - FIELDS)
    if unknown:
        raise TraceError(f"unknown field {unknown[0]!r:.80}; what else there is to say belongs in meta")
    for name in NAMES:
        if not isinstance(content.get(name), str) or not content[name]:
            raise TraceError(f"{name} must be a string that is not empty, got {content.get(name)!r:.80}")
    for name in OPTIONAL_NAMES:
        if not isinstance(content.get(name), str | None):
            raise TraceError(f"{name} must be a string, got {content[name]!r:.80}")
    check_messages(content.get("messages"))
    check_tools(content.get("tools"))
    check_meta(content.get("meta", {}), content["messages"])
    tools = content.get("tools")
    return Trace(
        id=content["id"],
        source=content["source"],
        domain=content["domain"],
        messages=tuple(content["messages"]),
        model=content.get("model"),
        group=content.get("group"),
        tools=None if tools is None else tuple(tools),
        meta=content.get("meta", {}),
    )


def check_tools(tools: Any) -> None:
    """Tools are absent or OpenAI function schemas."""
    if tools is None:
        return
    if not isinstance(tools, list):
        raise TraceError("tools must be a list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise TraceError(f"tools[{index}] must be a function with a name")


def check_meta(meta: Any, messages: list[Message]) -> None:
    """`meta.generated` lists assistant messages in order, and the record ends with a generated one."""
    if not isinstance(meta, dict):
        raise TraceError("meta must be an object")
    last = len(messages) - 1
    if messages[last]["role"] != "assistant":
        raise TraceError(f"messages[{last}]: a trace must end with an assistant turn")
    indices = meta.get("generated")
    if indices is None:
        return
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index <= last for index in indices):
        raise TraceError(f"meta.generated must list indices from 0 to {last}, got {indices!r:.80}")
    if indices != sorted(set(indices)):
        raise TraceError(f"meta.generated must be in ascending order, got {indices!r:.80}")
    for index in indices:
        if messages[index]["role"] != "assistant":
            raise TraceError(f"meta.generated: messages[{index}] is not an assistant message")
    if not indices or indices[-1] != last:
        raise TraceError("meta.generated must hold the last message")


def encode_trace(trace: Trace) -> bytes:
    """The trace as one line of JSON in UTF-8; optional fields without a value are left out."""
    content = {
        "id": trace.id,
        "source": trace.source,
        "domain": trace.domain,
        "model": trace.model,
        "group": trace.group,
        "messages": list(trace.messages),
        "tools": None if trace.tools is None else list(trace.tools),
        "meta": dict(trace.meta) or None,
    }
    present = {name: value for name, value in content.items() if value is not None}
    try:
        return json.dumps(present, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(present, ensure_ascii=True).encode() + b"\n"
