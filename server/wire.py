"""What requests look like on the wire: lenient about what is not known, strict about what is.

`null` means absent at every level. Fields that are not named here are kept as extras, see `unknown_fields`.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agentspec.errors import InvalidRequest
from agentspec.server.body import as_list, as_object
from agentspec.types import Origin, SpeculationParams

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128
"""Most choices of one request, those of all its prompts together."""

DRAFTERS = frozenset(str(origin.name).lower() for origin in Origin)


class Wire(BaseModel):
    """A JSON object of the API."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, data: Any) -> Any:
        fields = as_object(data)
        return data if fields is None else {name: value for name, value in fields.items() if value is not None}


def join_parts(content: Any) -> Any:
    """Content as one string; an empty list of parts is like null."""
    parts = as_list(content)
    if parts is None:
        return content
    return "".join(part_text(index, part) for index, part in enumerate(parts)) if parts else None


def part_text(index: int, part: Any) -> str:
    fields = as_object(part)
    if fields is None:
        raise ValueError(f"part {index} must be an object")
    kind, text = fields.get("type"), fields.get("text")
    if kind != "text":
        raise ValueError(f"part {index} has type {kind!r:.60}; only text parts are supported")
    if not isinstance(text, str):
        raise ValueError(f"part {index} must have a string in text")
    return text


def encode_arguments(arguments: Any) -> Any:
    """Some clients send back the arguments of a call as an object."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def list_of_stops(stop: Any) -> Any:
    stops = [stop] if isinstance(stop, str) else as_list(stop)
    if stops is None or not all(isinstance(item, str) for item in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"must have at most {MAX_STOPS} strings, got {len(stops)}")
    if "" in stops:
        raise ValueError("must not hold an empty string")
    return stops


def known_drafters(names: list[str] | None) -> list[str] | None:
    for name in names or []:
        if name not in DRAFTERS:
            raise ValueError(f"knows {sorted(DRAFTERS)}, got {name!r:.60}")
    return names


def pairs_of_bias(bias: Any) -> Any:
    """Token ids, which JSON makes strings, with what is added to their logits."""
    fields = as_object(bias)
    if fields is None:
        raise ValueError("must be an object of token ids and numbers")
    pairs = []
    for name, value in fields.items():
        if not name.isascii() or not name.isdigit() or len(name) > 10:
            raise ValueError(f"has the key {name!r:.40}, which is no token id")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ValueError(f"must have numbers from -100 to 100, got {value!r:.40} for token {name}")
        pairs.append((int(name), float(value)))
    return pairs


def list_of_prompts(prompt: Any) -> Any:
    """One prompt or several, each a text or token ids."""
    if isinstance(prompt, str):
        prompt = [prompt]
    prompts = as_list(prompt)
    if prompts is None:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if prompts and all(is_integer(token) for token in prompts):
        prompts = [prompts]
    if not prompts or not all(prompts):
        raise ValueError("must not be empty, nor hold an empty prompt")
    if len(prompts) > MAX_CHOICES:
        raise ValueError(f"must have at most {MAX_CHOICES} prompts, got {len(prompts)}")
    if not all(isinstance(one, str) for one in prompts) and not all(is_token_list(one) for one in prompts):
        raise ValueError("must be all strings or all lists of token ids")
    return prompts


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_list(value: Any) -> bool:
    tokens = as_list(value)
    return tokens is not None and all(is_integer(token) for token in tokens)


class FunctionCall(Wire):
    name: str = Field(min_length=1)
    arguments: Annotated[str, BeforeValidator(encode_arguments)] = ""


class ToolCall(Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(join_parts)] = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def needs_content(self) -> "Message":
        if self.content is None and self.role in ("system", "developer", "user"):
            raise ValueError(f"a {self.role} message must have content")
        return self


class Function(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"] = "function"
    function: Function


def text_of_prediction(content: Any) -> Any:
    """Content as one string; an empty list of parts predicts nothing."""
    return "" if as_list(content) == [] else join_parts(content)


class Prediction(Wire):
    type: Literal["content"]
    content: Annotated[str, BeforeValidator(text_of_prediction)]


class StreamOptions(Wire):
    include_usage: bool = False


class Speculation(Wire):
    """A request's own control over drafting; ours, so an unknown key is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = True
    max_draft_tokens: int = Field(default=SpeculationParams().max_draft_tokens, ge=0)
    drafters: Annotated[list[str] | None, AfterValidator(known_drafters)] = None
    exact: bool = False
    report: bool = False


class Generating(Wire):
    """What the bodies of all endpoints that generate have in common."""

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stop: Annotated[list[str], BeforeValidator(list_of_stops)] = []
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = None
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    logit_bias: Annotated[list[tuple[int, float]], BeforeValidator(pairs_of_bias)] = []
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    ignore_eos: bool = False
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: dict[str, Any] = {}
    structured_outputs: dict[str, Any] = {}
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    speculation: Speculation = Speculation()
    user: str | None = None
    metadata: dict[str, Any] = {}
    prompt_cache_key: str | None = None


class ChatRequest(Generating):
    """The body of `POST /v1/chat/completions`, as far as it is understood."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    prediction: Prediction | None = None

    @field_validator("top_logprobs")
    @classmethod
    def needs_logprobs(cls, count: int, others: ValidationInfo) -> int:
        if count and not others.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return count


class TextRequest(Generating):
    """The body of `POST /v1/completions`, as far as it is understood."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(list_of_prompts)]
    max_tokens: int = Field(default=16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True
    """Whether the tokenizer adds the tokens that it puts around every text."""


Request = TypeVar("Request", bound=Wire)


def parse_request(kind: type[Request], body: dict[str, Any]) -> Request:
    """The request in `body`; raises `InvalidRequest` that names the first wrong field by its path."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = field_path(first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{path}: {reason}" if path else reason, param=path or None) from None


def field_path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from its parts."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")[:200]


def unknown_fields(model: BaseModel, path: str = "") -> Iterator[str]:
    """Paths of the fields that nothing here reads, list indices left out."""
    for name in model.model_extra or {}:
        yield f"{path}{name}"
    for name in type(model).model_fields:
        value = getattr(model, name)
        for item in as_list(value) or [value]:
            if isinstance(item, BaseModel):
                yield from unknown_fields(item, f"{path}{name}.")
