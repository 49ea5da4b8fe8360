"""Options that a verifying engine could get wrong are refused as a whole: never ignored, never in mid-stream."""

from typing import Any

import pytest

from tests.server.conftest import ScriptedWorker, ask, error_of, post


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
    ("name", "value"),
    [
        ("response_format", {"type": "structural_tag"}),
        ("structured_outputs", {"structural_tag": "{}"}),
        ("structured_outputs", {"regex": "a+", "whitespace_pattern": " "}),
        ("guided_whitespace_pattern", " "),
    ],
)
def test_grammars_that_are_not_known_are_refused_not_ignored(name: str, value: Any) -> None:
    refused(**{name: value})
