"""What a recorded conversation may look like: OpenAI chat messages, checked one by one."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.errors import TraceError

Message = Mapping[str, Any]

FIELDS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "tool_calls", "reasoning_content"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}
"""Fields that a message of each role may have."""


def check_messages(messages: Any) -> None:
    """Raises `TraceError` that names the first wrong message by its index.

    Every tool result must answer one earlier call, and no two calls may share an id: else which result belongs to
    which call would be a guess.
    """
    if not isinstance(messages, list) or not messages:
        raise TraceError("messages must be a list that is not empty")
    called: set[str] = set()
    answered: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        check_fields(message, where)
        check_content(message, where)
        for position, call in enumerate(message.get("tool_calls", ())):
            identifier = checked_call(call, f"{where}.tool_calls[{position}]")
            if identifier in called:
                raise TraceError(f"{where}.tool_calls[{position}]: the id {identifier!r:.80} was used before")
            called.add(identifier)
        if message["role"] == "tool":
            check_answer(message, where, called, answered)


def check_fields(message: Any, where: str) -> None:
    """Role known, fields known for the role, texts are texts."""
    if not isinstance(message, dict):
        raise TraceError(f"{where} must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in FIELDS:
        raise TraceError(f"{where}.role must be one of {', '.join(FIELDS)}, got {role!r:.80}")
    unknown = sorted(set(message) - FIELDS[role])
    if unknown:
        raise TraceError(f"{where}: a message of role {role} has no field {unknown[0]!r:.80}")
    for name in ("name", "reasoning_content"):
        if name in message and not isinstance(message[name], str):
            raise TraceError(f"{where}.{name} must be a string, got {message[name]!r:.80}")


def check_content(message: Message, where: str) -> None:
    """Content is a string, or null on an assistant turn without text."""
    content = message.get("content")
    calls = message.get("tool_calls")
    if "tool_calls" in message and (not isinstance(calls, list) or not calls):
        raise TraceError(f"{where}.tool_calls must be a list that is not empty")
    if not isinstance(content, str) and not (content is None and message["role"] == "assistant"):
        raise TraceError(f"{where}.content must be a string, got {content!r:.80}")


def checked_call(call: Any, where: str) -> str:
    """The id of a well-formed tool call."""
    if not isinstance(call, dict) or call.get("type") != "function":
        raise TraceError(f"{where} must be an object of type 'function'")
    function = call.get("function")
    identifier = call.get("id")
    if not isinstance(identifier, str) or not identifier:
        raise TraceError(f"{where}.id must be a string that is not empty, got {identifier!r:.80}")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise TraceError(f"{where}.function.name must be a string that is not empty")
    if not isinstance(function.get("arguments"), str):
        raise TraceError(f"{where}.function.arguments must be a string, got {function.get('arguments')!r:.80}")
    return identifier


def check_answer(message: Message, where: str, called: set[str], answered: set[str]) -> None:
    """A tool result answers one call that came before it and has no result yet."""
    identifier = message.get("tool_call_id")
    if not isinstance(identifier, str) or identifier not in called:
        raise TraceError(f"{where}.tool_call_id: no earlier call has the id {identifier!r:.80}")
    if identifier in answered:
        raise TraceError(f"{where}.tool_call_id: the call {identifier!r:.80} has a result already")
    answered.add(identifier)


def repaired_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages with fresh call ids `call_0`, `call_1`, ...; results are matched to calls by their order.

    A result goes to the earliest open call of its own id, or else to the earliest open call.
    """
    open_calls: list[tuple[Any, str]] = []
    count = 0
    fixed: list[Message] = []
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            fresh = [f"call_{count + position}" for position in range(len(message["tool_calls"]))]
            open_calls += [(call["id"], name) for call, name in zip(message["tool_calls"], fresh, strict=True)]
            calls = [{**call, "id": name} for call, name in zip(message["tool_calls"], fresh, strict=True)]
            message = {**message, "tool_calls": calls}
            count += len(calls)
        elif message.get("role") == "tool":
            if not open_calls:
                raise TraceError(f"messages[{index}]: a tool result that no call is open for")
            same = [pair for pair in open_calls if pair[0] == message.get("tool_call_id")]
            pair = (same or open_calls)[0]
            open_calls.remove(pair)
            message = {**message, "tool_call_id": pair[1]}
        fixed.append(message)
    return fixed
