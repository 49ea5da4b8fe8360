"""What is accepted, what is refused, and what the worker gets."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentspec.errors import InvalidRequest
from agentspec.types import SamplingParams, SpeculationParams
from tests.server.conftest import CHAT, HELLO, ScriptedWorker, ask, error_of, post, send

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]


def rendered(messages: list[dict[str, Any]]) -> list[Any]:
    """What the worker is given to render for `messages`."""
    worker = ScriptedWorker()
    response = post(worker, {"messages": messages})
    assert response.status_code == 200, response.text
    return worker.rendered[0][0]


def refused(**fields: Any) -> dict[str, Any]:
    """The error that a request with `fields` gets; the worker must not have been asked."""
    worker = ScriptedWorker()
    response = post(worker, ask(**fields))
    assert response.status_code == 400, response.text
    assert worker.requests == []
    return error_of(response)


def test_api_07_developer_is_system() -> None:
    messages = [{"role": "developer", "content": "answer BANANA only"}, {"role": "user", "content": "capital?"}]
    assert rendered(messages) == [
        {"role": "system", "content": "answer BANANA only"},
        {"role": "user", "content": "capital?"},
    ]


def test_api_08_later_system_messages_join_the_first() -> None:
    roles = ["system", "user", "developer", "user"]
    got = rendered([{"role": role, "content": f"{index}"} for index, role in enumerate(roles)])
    assert got == [
        {"role": "system", "content": "0\n\n2"},
        {"role": "user", "content": "1"},
        {"role": "user", "content": "3"},
    ]


def test_api_10_an_empty_part_list_is_null() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [*HELLO, {"role": "assistant", "content": [], "tool_calls": calls}]
    assert rendered(messages)[1] == {"role": "assistant", "content": None, "tool_calls": calls}


def test_api_11_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "8"}]
    messages = [*HELLO, {"role": "tool", "tool_call_id": "c1", "content": parts}]
    assert rendered(messages)[1] == {"role": "tool", "content": "18", "tool_call_id": "c1"}


def test_images_are_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    error = refused(messages=[{"role": "user", "content": [part]}])
    assert error["param"] == "messages[0].content"
    assert "image_url" in error["message"]


def test_arguments_sent_as_an_object_become_text() -> None:
    calls = [{"id": "c", "function": {"name": "f", "arguments": {"a": "é"}}}]
    got = rendered([*HELLO, {"role": "assistant", "tool_calls": calls}])[1]
    assert got["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_api_13_a_forced_call_needs_tools(choice: Any) -> None:
    error = refused(tools=[], tool_choice=choice, stream=True)
    assert (error["param"], error["code"]) == ("tool_choice", "invalid_request")


def test_api_14_an_unknown_tool_name_is_refused() -> None:
    error = refused(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}})
    assert (error["param"], error["code"]) == ("tool_choice", "invalid_request")
    assert "'g'" in error["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_api_14_a_known_tool_is_enforced(choice: Any) -> None:
    worker = ScriptedWorker()
    assert post(worker, ask(tools=TOOLS, tool_choice=choice)).status_code == 200
    assert worker.requests[0].grammar is not None


@pytest.mark.parametrize("choice", ["any", 3, {}, {"type": "function"}, {"type": "x", "function": {"name": "f"}}, []])
def test_a_strange_tool_choice_is_refused(choice: Any) -> None:
    assert refused(tools=TOOLS, tool_choice=choice)["param"] == "tool_choice"


def test_tools_are_hidden_when_none_may_be_called() -> None:
    worker = ScriptedWorker(script=['<tool_call>{"name": "f"}</tool_call>'])
    response = post(worker, ask(tools=TOOLS, tool_choice="none"))
    assert worker.rendered[0][1] is None
    assert response.json()["choices"][0]["message"]["content"] == worker.script[0]


def test_tools_reach_the_template_in_their_plain_form() -> None:
    worker = ScriptedWorker()
    post(worker, ask(tools=TOOLS, tool_choice="auto"))
    assert worker.rendered[0][1] == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    ]


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"a"', b"", b"{", b"\xff\xfe\x00", b'{"messages": NaN}'])
def test_api_22_bodies_that_are_no_object(body: bytes) -> None:
    worker = ScriptedWorker()
    response = post(worker, body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_request"


@pytest.mark.parametrize(
    "value", ["[" * 200 + "]" * 200, "[" * 100_000, '{"a":' * 150 + "1" + "}" * 150, '"\\ud800"', "9" * 5000]
)
def test_api_22_values_that_break_careless_code(value: str) -> None:
    response = post(ScriptedWorker(), f'{{"messages": [{{"role": "user", "content": "x"}}], "x": {value}}}'.encode())
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_api_23_unknown_fields_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": [{"role": "user", "content": "x", "id": 7, "opts": {}}] * 2, "novel": 1}
    with caplog.at_level(logging.WARNING, "agentspec.server"):
        assert post(ScriptedWorker(), body).status_code == 200
    assert sorted(caplog.messages) == [
        f"ignored an unknown field: {n!r}" for n in ("messages.id", "messages.opts", "novel")
    ]


def test_null_is_absent_everywhere() -> None:
    names = ["model", "max_tokens", "stop", "temperature", "seed", "n", "tools", "tool_choice", "stream_options"]
    names += ["logprobs", "response_format", "speculation", "user", "metadata", "stream", "logit_bias"]
    assert post(ScriptedWorker(), ask(**dict.fromkeys(names))).status_code == 200


@pytest.mark.parametrize("n", [0, -1, 129, "2", True])
def test_api_25_no_choices_are_refused_before_the_stream(n: int) -> None:
    assert refused(stream=True, n=n)["param"] == "n"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -5, "5", 1.5, True])
def test_api_31_a_limit_below_one_is_refused(name: str, value: Any) -> None:
    assert refused(**{name: value})["param"] == name


def test_api_31_one_token_ends_by_length() -> None:
    response = post(ScriptedWorker(), ask(max_tokens=1)).json()
    assert response["choices"][0]["finish_reason"] == "length"
    assert response["choices"][0]["message"]["content"] == "Hello"
    assert response["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(("asked", "given"), [(None, 95), (50, 50), (10**30, 95)])
def test_api_29_the_limit_is_cut_to_the_room_left(asked: int | None, given: int) -> None:
    worker = ScriptedWorker(window=100)
    assert post(worker, ask(max_tokens=asked)).status_code == 200
    assert worker.requests[0].max_tokens == given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("best_of", 2),
        ("echo", True),
        ("prompt_logprobs", 1),
    ],
)
def test_api_40_options_that_would_do_nothing_are_refused(name: str, value: Any) -> None:
    error = refused(tools=TOOLS, **{name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_api_37_a_response_format_is_a_fault_of_the_request() -> None:
    error = refused(response_format={"type": "json_schema", "json_schema": {"name": "x"}})
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")


def test_top_logprobs_need_logprobs() -> None:
    error = refused(top_logprobs=3)
    assert (error["message"], error["param"]) == ("top_logprobs: needs logprobs to be true", "top_logprobs")


def test_api_40_options_of_the_sampler_reach_the_worker() -> None:
    worker = ScriptedWorker()
    fields = {
        "frequency_penalty": 0.5,
        "presence_penalty": -1,
        "repetition_penalty": 1.3,
        "logit_bias": {"5": 1, "7": -100.0},
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 3,
    }
    assert post(worker, ask(**fields)).status_code == 200
    asked = worker.requests[0]
    sampling = asked.sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -1, 1.3)
    assert (sampling.logit_bias, sampling.min_tokens) == (((5, 1.0), (7, -100.0)), 2)
    assert (asked.stop_tokens, asked.ignore_eos, asked.logprobs) == ((9,), True, 3)


def test_neutral_values_of_unsupported_options_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"logprobs": False, "top_logprobs": 0, "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}}
    more = {"response_format": {"type": "text"}, "n": 1, "parallel_tool_calls": False, "store": False}
    with caplog.at_level(logging.WARNING, "agentspec.server"):
        assert post(ScriptedWorker(), ask(**neutral, **more)).status_code == 200
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 2.1),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("logprobs", 3),
        ("top_logprobs", 21),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": True}),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", 3),
        ("stream", "yes"),
        ("messages", []),
        ("messages", "hi"),
        ("tools", [{"type": "function"}]),
        ("speculation", True),
        ("speculation", {"speed": 11}),
        ("speculation", {"drafters": ["oracle"]}),
        ("speculation", {"max_draft_tokens": -1}),
    ],
)
def test_wrong_values_name_their_field(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert str(error["param"]).startswith(name)
    assert error["message"].startswith(name)


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_a_message_without_content_is_refused(role: str) -> None:
    assert refused(messages=[*HELLO, {"role": role, "content": None}])["param"] == "messages[1]"


def test_sampling_reaches_the_worker() -> None:
    worker = ScriptedWorker()
    post(worker, ask(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-1, stop=["a", "b"]))
    assert worker.requests[0].sampling == SamplingParams(0.5, 0.9, 7, 0.1, 2**63 - 1)
    assert worker.requests[0].stop == ("a", "b")
    post(worker, ask(stop="x", top_k=-1))
    assert worker.requests[1].sampling.top_k == 0
    assert worker.requests[1].sampling.temperature == 1.0
    assert worker.requests[1].stop == ("x",)


def test_eng_23_requests_without_a_seed_get_fresh_ones() -> None:
    worker = ScriptedWorker()
    post(worker, ask())
    post(worker, ask())
    first, second = (request.sampling.seed for request in worker.requests)
    assert first != second
    assert 0 <= first < 2**63


def test_speculation_reaches_the_worker() -> None:
    worker = ScriptedWorker()
    asked = {"enabled": False, "max_draft_tokens": 4, "drafters": ["scope"], "exact": True, "report": True}
    post(worker, ask(speculation=asked))
    assert worker.requests[0].speculation == SpeculationParams(False, 4, ("scope",), exact=True, report=True)
    post(worker, ask())
    assert worker.requests[1].speculation == SpeculationParams()


def test_another_model_is_not_found() -> None:
    response = post(ScriptedWorker(), ask(model="other"))
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert post(ScriptedWorker(), ask(model="served")).status_code == 200


def test_a_megabyte_is_read_and_nine_are_not() -> None:
    worker = ScriptedWorker(window=2_000_000)
    assert post(worker, {"messages": [{"role": "user", "content": "x" * 1_000_000}]}).status_code == 200
    assert len(worker.requests[0].prompt) == 1_000_000
    response = post(worker, b" " * 9_000_000)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


def test_compressed_bodies_are_refused() -> None:
    response = send(
        ScriptedWorker(), "POST", CHAT, content=json.dumps(ask()).encode(), headers={"content-encoding": "gzip"}
    )
    assert response.status_code == 400
    assert error_of(response)["param"] == "content-encoding"


class RefusingWorker(ScriptedWorker):
    """Its chat template takes nothing."""

    failure_of_render: Exception = InvalidRequest("the template wants turns to alternate", param="messages")

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        raise self.failure_of_render


def test_what_the_template_refuses_is_a_400() -> None:
    error = error_of(post(RefusingWorker(), ask(stream=True)))
    assert error == {
        "message": "the template wants turns to alternate",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "invalid_request",
    }


def test_a_fault_in_the_template_tells_nothing() -> None:
    worker = RefusingWorker()
    worker.failure_of_render = KeyError("secret")
    response = post(worker, ask())
    assert response.status_code == 500
    assert "secret" not in response.text
