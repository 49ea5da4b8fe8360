"""Values that careless parsers, templates and encoders stumble over, in every place of a request."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentspec.server.wire import ChatRequest, Speculation
from tests.server.conftest import CHAT, HELLO, ScriptedWorker, ask, client_of, error_of, post

FIELDS = sorted({*ChatRequest.model_fields, "x", "response_format"} - {"messages"})
HERE = "here"
CALL = {"function": {"name": "f", "arguments": {"a": HERE}}}
PLACES: list[dict[str, Any]] = [
    *({"messages": HELLO, field: HERE} for field in FIELDS),
    *({"messages": HELLO, "speculation": {field: HERE}} for field in Speculation.model_fields),
    {"messages": HERE},
    {"messages": [HERE]},
    {"messages": [{"role": HERE, "content": "a"}]},
    {"messages": [{"role": "user", "content": HERE}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": HERE}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
    {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": HERE}}}]},
    {"messages": HELLO, "logit_bias": {"1": HERE}},
    {"messages": HELLO, "stop_token_ids": [HERE]},
    {"messages": HELLO, "metadata": {"session_id": HERE}},
]
REFUSED = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "1" + "0" * 5000,
    '"\\ud800"',
    '"a\\udfffb"',
    "[" * 200 + "]" * 200,
]
ODD = [
    "1" + "0" * 400, "-1" + "0" * 400, "1e308", "-0.0", "-0", "5e-324", "0.1" + "0" * 5000, "true", '"\\u0000"',
    '"\\u202e\\u0007"', '"\\ud83d\\ude00"', "[" * 90 + "]" * 90, "{}", '{"": {"": []}}', '[null]',
    '"' + "a" * 100_000 + '"',
]  # fmt: skip


def posted(body: str) -> tuple[httpx.Response, ScriptedWorker]:
    worker = ScriptedWorker()
    return post(worker, body.encode()), worker


def posted_everywhere(value: str) -> tuple[list[httpx.Response], ScriptedWorker]:
    """Answers to requests that hold a value at each place in turn, all to one app."""
    worker = ScriptedWorker()

    async def all_of_them() -> list[httpx.Response]:
        async with client_of(worker) as client:
            bodies = [json.dumps(place).replace(f'"{HERE}"', value) for place in PLACES]
            return [await client.post(CHAT, content=body.encode()) for body in bodies]

    return asyncio.run(all_of_them()), worker


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: value[:12])
def test_what_is_no_json_value_is_refused_wherever_it_stands(value: str) -> None:
    responses, worker = posted_everywhere(value)
    for place, response in zip(PLACES, responses, strict=True):
        assert response.status_code == 400, place
        assert len(error_of(response)["message"]) < 500
    assert (worker.rendered, worker.requests) == ([], [])


@pytest.mark.parametrize("value", ODD, ids=lambda value: value[:12])
def test_odd_values_are_taken_or_refused_by_name_wherever_they_stand(value: str) -> None:
    for place, response in zip(PLACES, posted_everywhere(value)[0], strict=True):
        assert response.status_code in (200, 400, 404), place
        if response.status_code != 200:
            assert len(error_of(response)["message"]) < 1000, place
        if not response.text.startswith("data: "):
            json.loads(response.content, parse_constant=pytest.fail)


def test_the_last_of_equal_keys_counts() -> None:
    first, last = json.dumps({"seed": 1, "messages": []}), json.dumps(ask(seed=7))
    response, worker = posted(first.removesuffix("}") + "," + last.removeprefix("{"))
    assert response.status_code == 200
    assert (worker.requests[0].sampling.seed, len(worker.requests[0].prompt)) == (7, len("hello"))


def test_negative_zero_is_zero() -> None:
    response, worker = posted(json.dumps(ask(temperature=-0.0, min_p=-0.0, frequency_penalty=-0.0)))
    assert response.status_code == 200
    sampling = worker.requests[0].sampling
    assert (sampling.temperature, sampling.min_p, sampling.frequency_penalty) == (0, 0, 0)


IDS: list[Any] = [
    "",
    " ",
    "\t",
    "a\nb",
    "a\r\nX-Evil: 1",
    "\x00",
    "\x7f",
    "\u202e",
    "é",
    "💥",
    "a" * 201,
    1,
    1.5,
    True,
    [],
    {},
]


@pytest.mark.parametrize("value", IDS, ids=repr)
def test_strange_ids_in_the_body_never_reach_a_header(value: Any) -> None:
    for body in (
        {"metadata": {"trajectory_id": value}},
        {"metadata": {"session_id": value}},
        {"prompt_cache_key": value},
    ):
        response, worker = posted(json.dumps({**body, "messages": [{"role": "user", "content": "x"}]}))
        if response.status_code == 200:
            named = response.headers["x-agentspec-trajectory"]
            assert named.isascii() and named.isprintable() and 0 < len(named) <= 200
            assert "x-evil" not in response.headers and worker.requests[0].trajectory.id == named
        else:
            assert error_of(response)["code"] == "invalid_request"
