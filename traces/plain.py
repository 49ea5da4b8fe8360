"""Conversations as clients log them, messages and perhaps tools, brought into the form of a trace."""

from pathlib import Path
from typing import Any

from agentspec.traces.messages import FIELDS as MESSAGE_FIELDS
from agentspec.traces.schema import FIELDS


def as_trace(content: Any, where: str) -> Any:
    """A record with all that a trace needs, as far as that can be had: what it lacks is named after its place
    (`file:line`), fields that there are not are left out, and so are messages after the last assistant turn. Whatever
    else is wrong stays for the check."""
    if not isinstance(content, dict):
        return content
    file, _, line = where.rpartition(":")
    stem = Path(file).name.partition(".")[0] or "runs"
    names = {"id": f"{stem}/{line}", "source": stem, "domain": "other"}
    given = {name: value for name, value in content.items() if name in FIELDS and value is not None}
    messages = given.get("messages")
    if isinstance(messages, list):
        given["messages"] = [plain_message(message) for message in up_to_last_turn(messages)]
    return names | given


def up_to_last_turn(messages: list[Any]) -> list[Any]:
    """The messages up to the last one of the assistant; all where it has none."""
    turns = [index for index, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "assistant"]
    return messages[: turns[-1] + 1] if turns else messages


def plain_message(message: Any) -> Any:
    """A message with the fields of its role alone, its text parts joined; a developer's is a system message."""
    if not isinstance(message, dict):
        return message
    role = "system" if message.get("role") == "developer" else message.get("role")
    known = MESSAGE_FIELDS.get(role, frozenset()) if isinstance(role, str) else frozenset[str]()
    kept = {name: value for name, value in message.items() if name in known and value not in (None, [])}
    kept["role"] = role
    kept["content"] = joined(message.get("content"))
    return kept


def joined(content: Any) -> Any:
    """The text of a list of text parts; anything else as it is."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    texts = [part.get("text") for part in content if part.get("type") == "text"]
    whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if whole else content
