"""No body, however strange, is a fault of ours."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.server.options import NEUTRAL
from agentspec.server.wire import ChatRequest, Function, Message, Speculation
from tests.server.conftest import ScriptedWorker, error_of, post

NAMES = sorted(
    {
        *ChatRequest.model_fields,
        *Message.model_fields,
        *Function.model_fields,
        *Speculation.model_fields,
        *NEUTRAL,
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
    | st.floats(allow_nan=False)
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
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(WORDS[:5])},
        optional={name: ANYTHING for name in Message.model_fields if name != "role"},
    ),
    min_size=1,
    max_size=4,
)
BODIES = (
    st.fixed_dictionaries({"messages": MESSAGES}, optional={name: ANYTHING for name in NAMES if name != "messages"})
    | ANYTHING
)


def answer(body: bytes) -> int:
    response = post(ScriptedWorker(), body)
    if response.status_code != 200:
        assert response.status_code in (400, 404)
        error_of(response)
    return response.status_code


@settings(deadline=None, max_examples=250)
@given(BODIES)
def test_any_json(body: Any) -> None:
    answer(json.dumps(body).encode())


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    assert answer(body) == 400


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), SCALARS, max_size=2))
def test_a_good_request_with_any_fields(fields: dict[str, Any]) -> None:
    answer(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())
