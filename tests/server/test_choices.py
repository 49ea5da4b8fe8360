"""Several choices of one request."""

import json
from dataclasses import replace
from typing import Any

import pytest

from agentspec.server.convert import SEED_STEP, choice_seed
from agentspec.types import FinishReason
from tests.server.conftest import CHAT, TEXT, ScriptedWorker, ask, error_of, events, post

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = ['Well.<tool_call>{"name": "f", ', '"arguments": {}}</tool_call>']


def asked_of(path: str, **fields: Any) -> dict[str, Any]:
    return ask(**fields) if path == CHAT else {"prompt": "hello", **fields}


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice or a chunk of it."""
    return str(choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", ""))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_all_choices_are_in_the_answer_and_the_prompt_counts_once(path: str) -> None:
    body = post(ScriptedWorker(), asked_of(path, n=3), path=path).json()
    assert [(choice["index"], text_of(choice)) for choice in body["choices"]] == [(n, "Hello world") for n in range(3)]
    prompt = body["usage"]["prompt_tokens"]
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (6, prompt + 6)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert prompt == post(ScriptedWorker(), asked_of(path), path=path).json()["usage"]["prompt_tokens"]
    assert body["timings"] == {
        "prompt_n": prompt - 2,
        "prompt_ms": 10.0,
        "predicted_n": 6,
        "predicted_ms": 20.0,
        "draft_n": 15,
        "draft_n_accepted": 9,
    }


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_api_38_two_choices_stream_interleaved(path: str) -> None:
    fields = asked_of(path, n=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = events(post(ScriptedWorker(), fields, path=path))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    assert "timings" in last and not any("timings" in chunk for chunk in chunks)
    pieces = [chunk["choices"][0] for chunk in chunks]
    for index in range(2):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert "".join(map(text_of, mine)) == "Hello world"
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + ["stop"]
    turns = [piece["index"] for piece in pieces if text_of(piece)]
    assert turns == [0, 1, 0, 1]


def test_a_stream_without_usage_carries_the_figures_on_its_last_chunk() -> None:
    *chunks, last = events(post(ScriptedWorker(), ask(n=2, stream=True, speculation={"report": True})))
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["timings"]["predicted_n"] == 4
    assert len(last["agentspec"]["choices"]) == 2
    assert not any("timings" in chunk or "agentspec" in chunk for chunk in chunks)


def test_each_choice_has_its_own_tool_calls() -> None:
    fields = ask(n=2, tools=TOOLS)
    for choice in post(ScriptedWorker(script=CALL), fields).json()["choices"]:
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
        assert choice["finish_reason"] == "tool_calls"
    chunks = events(post(ScriptedWorker(script=CALL), {**fields, "stream": True}))
    fragments = [
        (chunk["choices"][0]["index"], part["index"])
        for chunk in chunks
        for part in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert fragments == [(0, 0), (0, 0), (1, 0), (1, 0)]


def test_the_first_choice_is_the_request_alone_and_the_others_are_branches() -> None:
    worker = ScriptedWorker()
    post(worker, ask(seed=7, temperature=1))
    post(worker, ask(seed=7, temperature=1, n=3), {"x-agentspec-trajectory": worker.requests[0].trajectory.id})
    alone, *choices = worker.requests
    assert choices[0] == alone
    for number, choice in enumerate(choices):
        seed = (7 + number * SEED_STEP) % 2**63
        expected = replace(alone, branch=number > 0, sampling=replace(alone.sampling, seed=seed))
        assert choice == expected


def test_neighbouring_seeds_share_no_choice() -> None:
    seeds = [choice_seed(seed, choice) for seed in range(100) for choice in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("best_of", [1, 2, 4])
def test_best_of_may_only_be_n(path: str, best_of: int) -> None:
    response = post(ScriptedWorker(), asked_of(path, n=2, best_of=best_of), path=path)
    if best_of == 2:
        assert len(response.json()["choices"]) == 2
    else:
        assert (error_of(response)["param"], error_of(response)["code"]) == ("best_of", "unsupported_parameter")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_one_choice_stops_all(stream: bool) -> None:
    worker = ScriptedWorker(failure=RuntimeError("broken"), fail_after=1)
    response = post(worker, ask(n=3, stream=stream))
    assert (worker.running, worker.closed_early) == (0, 3)
    if stream:
        assert json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["type"]
    else:
        assert response.status_code == 500


def test_choices_may_end_differently() -> None:
    worker = ScriptedWorker(finish=FinishReason.LENGTH)
    assert [choice["finish_reason"] for choice in post(worker, ask(n=2)).json()["choices"]] == ["length"] * 2
