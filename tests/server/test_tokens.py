"""Token ids of prompts and texts of token ids, without a generation."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.engine.service import Engine
from tests.server.conftest import CHAT, HELLO, TEXT, ScriptedWorker, ask, error_of, post
from tests.serving import in_process

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}


def tokenize(**fields: Any) -> httpx.Response:
    return post(ScriptedWorker(), fields, path="/tokenize")


def detokenize(**fields: Any) -> httpx.Response:
    return post(ScriptedWorker(), fields, path="/detokenize")


def test_a_text_has_its_tokens() -> None:
    assert tokenize(prompt="ab").json() == {
        "tokens": [99, 97, 98],
        "count": 3,
        "max_model_len": ScriptedWorker().window,
    }
    assert tokenize(prompt="ab", add_special_tokens=False).json()["tokens"] == [97, 98]


def test_a_chat_has_the_tokens_that_its_completion_begins_with() -> None:
    worker = ScriptedWorker()
    post(worker, ask(tools=[TOOL]))
    assert tokenize(messages=HELLO, tools=[TOOL]).json()["tokens"] == list(worker.requests[0].prompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"prompt": "a", "model": 5}, "model"),
    ],
)
def test_what_is_no_prompt_is_named(fields: dict[str, Any], param: str) -> None:
    response = tokenize(**fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({}, "tokens"), ({"tokens": "a"}, "tokens"), ({"tokens": [1, 100]}, "tokens[1]"), ({"tokens": [-1]}, "tokens[0]"),
     ({"tokens": [1.5]}, "tokens[0]"), ({"tokens": [True]}, "tokens[0]")],
)  # fmt: skip
def test_what_are_no_tokens_is_named(fields: dict[str, Any], param: str) -> None:
    response = detokenize(**fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_another_model_is_not_found() -> None:
    assert tokenize(prompt="a", model="other").status_code == 404
    assert detokenize(tokens=[1], model="other").status_code == 404


def test_bytes_that_are_no_text_are_marked() -> None:
    assert detokenize(tokens=[0, 1, 50]).json() == {"prompt": "Hello world\ufffd"}
    assert detokenize(tokens=[]).json() == {"prompt": ""}


def test_tokens_come_back_as_text_and_are_those_of_usage(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        text = "caf\u00e9 <|im_end|> \U0001f600"
        tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
        counted = (await client.post("/tokenize", json={"messages": HELLO})).json()["count"]
        for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": text})):
            answer = (await client.post(path, json={**body, "max_tokens": 1})).json()
            assert answer["usage"]["prompt_tokens"] == (counted if path == CHAT else len(tokens))

    in_process(tiny_model, scenario)
