"""Chat messages to token ids through the model's own template, with tools even where the template has none."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from agentspec.engine.control import ControlText, new_mark
from agentspec.errors import InvalidRequest, ModelError

Message = dict[str, Any]

MAX_DEPTH = 100
"""Levels of a call's arguments; deeper ones are shown to the model as the text they came in."""

TOOL_NOTE = """

# Tools

You may call the functions described between the tools tags, one JSON schema per line:
<tools>
{schemas}
</tools>

To call a function, answer with its name and arguments as JSON between tool_call tags:
<tool_call>
{{"name": "function name", "arguments": {{}}}}
</tool_call>"""


class Chat:
    """The tokenizer of a model and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        template = tokenizer.chat_template or ""
        if not template:
            raise ModelError("the model has no chat template: AgentSpec serves chat models")
        self.template_has_tools = "tools" in str(template)
        self.control = ControlText(tokenizer)

    @staticmethod
    def load(folder: Path) -> "Chat":
        """The tokenizer of a model folder."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever a broken file makes the libraries raise
            raise ModelError(f"cannot load a tokenizer from {folder}: {error}") from error
        return Chat(tokenizer)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        """Token ids of the prompt, the start of the assistant's turn included.

        Control tokens come from the template alone: those spelled out in messages or tools are encoded as text.
        """
        mark = new_mark()
        return self.control.encode(self.text(messages, tools, mark, asking=True), mark)

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[int, ...]:
        """Token ids that a model would generate after `messages` to say `message`, to the end of its turn."""
        mark = new_mark()
        ids = self.control.encode(self.reply(messages, message, tools, mark), mark)
        ends = self.end_tokens()
        return ids[: next((at for at, id in enumerate(ids, 1) if id in ends), len(ids))]

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        mark: str,
    ) -> str:
        """What the template writes after `messages` for `message`, perhaps with more after the end of its turn."""
        asked = self.text(messages, tools, mark, asking=True)
        said = self.text([*messages, message], tools, mark, asking=False)
        known = bisect_left(range(1, len(asked) + 1), True, key=lambda size: not said.startswith(asked[:size]))
        return said[known:]

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        mark: str,
        *,
        asking: bool,
    ) -> str:
        """What the template makes of a conversation, control tokens in it cut by `mark`; with `asking`, the start of
        the assistant's turn at its end."""
        plain = [plain_message(message) for message in messages]
        if tools and not self.template_has_tools:
            plain = with_tool_note(plain, tools)
        if not self.template_has_tools:
            plain = [without_tool_fields(message) for message in plain]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self.control.cut(plain, mark),
                    tools=self.control.cut(tools, mark) if tools and self.template_has_tools else None,
                    add_generation_prompt=asking,
                    tokenize=False,
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error

    def tokenize(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Token ids of a text as it is: control tokens spelled in it are real ones. With `special`, the tokenizer adds
        those that it puts around every text, such as a first one."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=special))

    def end_tokens(self, *configured: Any) -> frozenset[int]:
        """Ids that end a turn: the tokenizer's and those of the given configuration values (int, list or None)."""
        ends = {self.tokenizer.eos_token_id}
        for value in configured:
            ends.update(value if isinstance(value, list) else [value])
        return frozenset(end for end in ends if end is not None)


def plain_message(message: Mapping[str, Any]) -> Message:
    """A message as templates expect it: content a string, call arguments an object."""
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = message.get("content") or ""
    if message.get("tool_calls"):
        plain["tool_calls"] = [with_parsed_arguments(call) for call in message["tool_calls"]]
    return plain


def with_parsed_arguments(call: Mapping[str, Any]) -> Message:
    """A tool call whose arguments are a JSON value where they parse as one; templates print them as JSON."""
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        function["arguments"] = parsed(function["arguments"])
    return {**call, "type": "function", "function": function}


def parsed(text: str) -> Any:
    """The value of JSON text; the text itself if it is not JSON, nests deep or has no form that UTF-8 can encode."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return text if nests_deep(value) else value


def nests_deep(value: Any) -> bool:
    """Whether a JSON value has more than `MAX_DEPTH` levels of arrays and objects."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for entry in level for child in entries(entry)]
    return bool(level)


def entries(value: Any) -> Iterable[Any]:
    """What an array or object holds; nothing for other values."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def with_tool_note(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The tool schemas described in the system message, for templates that know no tools."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    note = TOOL_NOTE.format(schemas=schemas)
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": messages[0]["content"] + note}
        return [first, *messages[1:]]
    return [{"role": "system", "content": note.strip()}, *messages]


def without_tool_fields(message: Message) -> Message:
    """A message with roles and fields that every template knows: calls and results are written out as tagged text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": f.get("name"), "arguments": f.get("arguments")}, ensure_ascii=False)
        + "\n</tool_call>"
        for f in (call["function"] for call in message.get("tool_calls", ()))
    ]
    content = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return {"role": message["role"], "content": content}
