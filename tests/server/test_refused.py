"""Options that a verifying engine could get wrong are refused as a whole: never ignored, never in mid-stream."""

from typing import Any

import pytest

from tests.server.conftest import ScriptedWorker, ask, error_of, post

GRAMMAR = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def refused(**fields: Any) -> None:
    """Both ways of asking are refused before the worker hears of it."""
    name = next(iter(fields))
    for stream in (False, True):
        worker = ScriptedWorker()
        response = post(worker, ask(stream=stream, **fields))
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        assert (error_of(response)["param"], error_of(response)["code"]) == (name, "unsupported_parameter")
        assert worker.requests == []


@pytest.mark.parametrize(
    ("name", "value"), [("frequency_penalty", 0.5), ("presence_penalty", 0.5), ("repetition_penalty", 1.3)]
)
def test_eng_19_eng_20_eng_32_penalties_are_refused_not_ignored(name: str, value: float) -> None:
    refused(**{name: value})


def test_eng_19_a_minimum_of_tokens_is_refused_not_ignored() -> None:
    refused(min_tokens=6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", GRAMMAR),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("guided_grammar", "root ::= 'a'"),
        ("guided_choice", ["a", "b"]),
        ("structured_outputs", {"regex": "a+"}),
    ],
)
def test_eng_25_eng_26_grammars_are_refused_not_ignored(name: str, value: Any) -> None:
    refused(**{name: value})


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 5}, {"top_logprobs": 5}])
def test_api_32_api_34_api_35_logprobs_are_refused_not_ignored(fields: dict[str, Any]) -> None:
    refused(**fields)


def test_api_38_two_choices_are_refused_before_the_stream() -> None:
    refused(n=2)
