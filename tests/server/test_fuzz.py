"""No body, however strange, is a fault of ours."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.server.options import NEUTRAL, NEUTRAL_FOR_TEXT
from agentspec.server.wire import ChatRequest, Function, Message, Speculation, TextRequest
from tests.server.conftest import CHAT, TEXT, ScriptedWorker, error_of, post

NAMES = sorted(
    {
        *ChatRequest.model_fields,
        *TextRequest.model_fields,
        *Message.model_fields,
        *Function.model_fields,
        *Speculation.model_fields,
        *NEUTRAL,
        *NEUTRAL_FOR_TEXT,
        "type",
        "text",
        "function",
        "x",
    }
)
WORDS = [
    "user",
    "system",
    "assistant",
    "tool",
    "developer",
    "text",
    "function",
    "required",
    "none",
    "auto",
    "served",
    "",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=5)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)
GOOD = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ALL_GOOD: dict[str, Any] = {
    "messages": [GOOD, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "y"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "speculation": {"enabled": True},
    "metadata": {"session_id": "s"},
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value inside `value` can be replaced."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in inner for deeper in paths(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def answer(body: bytes, path: str = CHAT) -> int:
    response = post(ScriptedWorker(), body, path=path)
    if response.status_code != 200:
        assert response.status_code in (400, 404)
        error_of(response)
    return response.status_code


@settings(deadline=None, max_examples=60)
@given(ANYTHING)
def test_any_json(body: Any) -> None:
    answer(json.dumps(body).encode())


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    assert answer(body) == 400


@settings(deadline=None, max_examples=250)
@given(st.sampled_from(paths(ALL_GOOD)), ANYTHING)
def test_a_good_request_with_one_thing_replaced(path: tuple[Any, ...], new: Any) -> None:
    assert answer(json.dumps(ALL_GOOD).encode()) == 200
    answer(json.dumps(replaced(ALL_GOOD, path, new)).encode())


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3))
def test_a_good_request_with_any_fields(fields: dict[str, Any]) -> None:
    answer(json.dumps({**fields, "messages": [GOOD]}).encode())


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3))
def test_a_good_message_with_any_fields(fields: dict[str, Any]) -> None:
    answer(json.dumps({"messages": [GOOD, {**GOOD, **fields}]}).encode())


ANY_TEXT = {"prompt": ["a", "é"], "n": 2, "echo": True, "logprobs": 2, "stream_options": {}, "logit_bias": {"5": 1}}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(paths(ANY_TEXT)), ANYTHING)
def test_a_good_completion_with_one_thing_replaced(path: tuple[Any, ...], new: Any) -> None:
    assert answer(json.dumps(ANY_TEXT).encode(), TEXT) == 200
    answer(json.dumps(replaced(ANY_TEXT, path, new)).encode(), TEXT)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3))
def test_a_good_completion_with_any_fields(fields: dict[str, Any]) -> None:
    answer(json.dumps({"prompt": [1, 2], **fields}).encode(), TEXT)
