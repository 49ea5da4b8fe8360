"""Options that other servers know and this one cannot honour: refused, never ignored in silence."""

from collections.abc import Mapping
from typing import Any

from agentspec.errors import InvalidRequest, UnsupportedParameter
from agentspec.server.body import as_object
from agentspec.server.wire import MAX_CHOICES, ChatRequest, Generating, TextRequest

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "typical_p": (1,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Values, beside null, that ask for nothing and so are accepted."""

NEUTRAL_FOR_CHAT: Mapping[str, tuple[Any, ...]] = {"echo": (False,), "prompt_logprobs": (), "suffix": ("",)}
NEUTRAL_FOR_TEXT: Mapping[str, tuple[Any, ...]] = {"prediction": (), "suffix": ("",), "tools": ([],)}
"""The same for what one endpoint cannot honour; a suffix would have to be written before."""


def refuse_unsupported(body: Mapping[str, Any], own: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `UnsupportedParameter` for an option, of all endpoints or this one's `own`, whose value would have to be
    ignored."""
    for name, neutral in {**NEUTRAL, **own}.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise UnsupportedParameter(f"{name} is not supported; leave it out", param=name)


def check_choices(asked: Generating) -> None:
    """Raises when choices would have to be left out of the answer."""
    if asked.best_of not in (None, asked.n):
        raise UnsupportedParameter(
            f"best_of: only n itself, {asked.n}, is supported, got {asked.best_of}", param="best_of"
        )


def check_text(asked: TextRequest) -> None:
    """Raises for fields of a text completion that do not go together."""
    if len(asked.prompt) * asked.n > MAX_CHOICES:
        raise InvalidRequest(
            f"n: {len(asked.prompt)} prompts with {asked.n} choices each are more than {MAX_CHOICES}", param="n"
        )
    if asked.max_tokens == 0 and not asked.echo and asked.prompt_logprobs is None:
        raise InvalidRequest("max_tokens: 0 needs echo or prompt_logprobs", param="max_tokens")
    if asked.stream and asked.prompt_logprobs is not None:
        raise UnsupportedParameter(
            "prompt_logprobs: not in a stream; use echo and logprobs there", param="prompt_logprobs"
        )


def check_tools(asked: ChatRequest) -> None:
    """Raises `InvalidRequest` for a call of a tool that is not there."""
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
