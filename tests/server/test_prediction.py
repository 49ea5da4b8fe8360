"""The `prediction` field: what reaches the worker, what usage says of it, and what is refused."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agentspec.types import Delta, GenerationRequest
from tests.server.conftest import TEXT, ScriptedWorker, ask, error_of, events, post


@dataclass
class Predicting(ScriptedWorker):
    """Has drafted from the prediction, alone and together with the history."""

    async def generate_one(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        async for delta in super().generate_one(request):
            if delta.report is None:
                yield delta
            else:
                drafted = {"prediction": 6, "trajectory+prediction": 3, "trajectory": 2}
                accepted = {"prediction": 4, "trajectory+prediction": 3, "trajectory": 1}
                yield replace(delta, report=replace(delta.report, drafted=drafted, accepted=accepted))


def content(value: Any) -> dict[str, Any]:
    return {"type": "content", "content": value}


@pytest.mark.parametrize("given", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_a_prediction_reaches_the_worker_in_tokens(given: Any) -> None:
    worker = Predicting()
    response = post(worker, ask(prediction=content(given)))
    assert response.status_code == 200
    assert worker.requests[0].prediction == (97, 98)
    details = response.json()["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}


def test_a_stream_says_so_in_its_usage() -> None:
    asked = ask(prediction=content("ab"), stream=True, stream_options={"include_usage": True})
    usage = events(post(Predicting(), asked))[-1]["usage"]
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}


def test_choices_share_a_prediction_and_usage_adds_them_up() -> None:
    worker = Predicting()
    usage = post(worker, ask(prediction=content("ab"), n=2)).json()["usage"]
    assert [request.prediction for request in worker.requests] == [(97, 98)] * 2
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 14, "rejected_prediction_tokens": 4}


@pytest.mark.parametrize("given", ["", []])
def test_an_empty_prediction_predicts_nothing(given: Any) -> None:
    worker = ScriptedWorker()
    usage = post(worker, ask(prediction=content(given))).json()["usage"]
    assert worker.requests[0].prediction == ()
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


@pytest.mark.parametrize("fields", [{}, {"prediction": None}])
def test_without_a_prediction_usage_says_nothing_of_one(fields: dict[str, Any]) -> None:
    worker = ScriptedWorker()
    assert "completion_tokens_details" not in post(worker, ask(**fields)).json()["usage"]
    assert worker.requests[0].prediction == ()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("text", "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        (content(None), "prediction.content"),
        (content(5), "prediction.content"),
        (content([{"type": "image_url"}]), "prediction.content"),
        (content([{"type": "text", "text": 5}]), "prediction.content"),
        (content("x" * 10_001), "prediction"),
    ],
)
def test_a_bad_prediction_is_named(given: Any, param: str) -> None:
    response = post(ScriptedWorker(), ask(prediction=given))
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_texts_have_no_predictions() -> None:
    error = error_of(post(ScriptedWorker(), {"prompt": "a", "prediction": content("b")}, path=TEXT))
    assert (error["param"], error["code"]) == ("prediction", "unsupported_parameter")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}}}


def test_tools_and_schemas_reach_the_worker_as_an_outline() -> None:
    worker = ScriptedWorker()
    formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    bodies = [ask(), ask(tools=[TOOL]), ask(tools=[TOOL], tool_choice="none"), ask(tools=[TOOL])]
    bodies += [ask(response_format=formatted), ask(guided_json=SCHEMA), ask(tools=[TOOL], response_format=formatted)]
    for body in bodies:
        assert post(worker, body).status_code == 200
    outlines = [request.outline for request in worker.requests]
    assert [len(outline.tools) for outline in outlines] == [0, 1, 0, 1, 0, 0, 1]
    assert outlines[1].tools[0]["function"]["name"] == "f"
    named = [None if outline.schema is None else outline.schema["properties"] for outline in outlines]
    assert named == [None] * 4 + [SCHEMA["properties"]] * 3
    assert outlines[1].digest == outlines[3].digest
    assert len({outline.digest for outline in outlines}) == 4
