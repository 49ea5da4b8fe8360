"""Options that other servers know and this one cannot honour: refused, never ignored in silence."""

from collections.abc import Mapping
from typing import Any

from agentspec.errors import InvalidRequest, UnsupportedParameter
from agentspec.server.body import as_object
from agentspec.server.wire import ChatRequest

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "typical_p": (1,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Values, beside null, that ask for nothing and so are accepted."""


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises `UnsupportedParameter` for a known option with a value that would have to be ignored."""
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise UnsupportedParameter(f"{name} is not supported; leave it out", param=name)


def check_choices(asked: ChatRequest) -> None:
    """Raises when more than one answer is asked for, or a call of a tool that is not there."""
    if asked.n > 1:
        raise UnsupportedParameter(f"n: only one choice is supported, got {asked.n}", param="n")
    choice = asked.tool_choice
    if choice in (None, "none", "auto"):
        return
    if choice != "required":
        check_named_tool(asked)
    if not asked.tools:
        raise InvalidRequest("tool_choice: needs at least one tool in tools", param="tool_choice")


def check_named_tool(asked: ChatRequest) -> None:
    """Raises `InvalidRequest` unless `tool_choice` is an object that names a tool of the request."""
    choice = as_object(asked.tool_choice) or {}
    name = (as_object(choice.get("function")) or {}).get("name")
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise InvalidRequest("tool_choice: must be none, auto, required or name a function", param="tool_choice")
    if name not in [tool.function.name for tool in asked.tools]:
        raise InvalidRequest(f"tool_choice: no tool is named {name!r:.80}", param="tool_choice")
