"""`/v1/completions`: what is accepted, what is refused, and how text, prompts and log-probabilities are written."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentspec.server.text_logprobs import Speller, pieces_of, prompt_entries
from agentspec.types import TokenLogprob
from tests.server.conftest import TEXT, ScriptedWorker, client_of, error_of, events, post, send

RUN = "x-agentspec-trajectory"


def complete(worker: ScriptedWorker | None = None, **fields: Any) -> httpx.Response:
    return post(worker or ScriptedWorker(), {"prompt": "hi", **fields}, path=TEXT)


def refused(**fields: Any) -> dict[str, Any]:
    """The error, the same in a stream; the worker must not have been asked."""
    errors = []
    for stream in (False, True):
        worker = ScriptedWorker(window=50)
        response = complete(worker, **{"stream": stream, **fields})
        assert response.status_code == 400, response.text
        assert worker.requests == []
        errors.append(error_of(response))
    assert errors[0] == errors[1]
    return errors[0]


def test_a_completion_has_the_shape_of_the_api() -> None:
    body = complete(model="served").json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == "served"
    assert body["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["total_tokens"] == 5


def test_a_stream_says_the_same_in_pieces() -> None:
    response = complete(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("Hello", None),
        (" world", None),
        ("", "stop"),
    ]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)


def test_a_stream_that_has_nothing_to_show_yet_says_nothing() -> None:
    text = complete(ScriptedWorker(script=["", "", "x"]), stream=True, prompt=[1, 2], echo=False).text
    assert [frame for frame in text.split("\n\n") if frame.startswith(":")] == []


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [(99, 97, 98)]),
        (["ab", "a"], [(99, 97, 98), (99, 97)]),
        ([5, 0, 7], [(5, 0, 7)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
        ([0], [(0,)]),
    ],
)
def test_a_prompt_is_text_or_tokens_one_or_several(prompt: Any, tokens: list[tuple[int, ...]]) -> None:
    worker = ScriptedWorker()
    body = complete(worker, prompt=prompt).json()
    assert [request.prompt for request in worker.requests] == tokens
    assert [choice["index"] for choice in body["choices"]] == list(range(len(tokens)))
    assert body["usage"]["prompt_tokens"] == sum(len(one) for one in tokens)


def test_the_tokens_around_a_text_can_be_left_out() -> None:
    worker = ScriptedWorker()
    complete(worker, prompt="ab", add_special_tokens=False)
    assert worker.requests[0].prompt == (97, 98)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", ""], [[1], []], None, 5, {}, [1.5], [True], ["a", 1], ["a", [1]], [[1], "a"], [["a"]]],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    assert refused(prompt=prompt)["param"] == "prompt"


@pytest.mark.parametrize(("prompt", "param"), [([1, 100], "prompt"), ([[1], [-1]], "prompt[1]"), ([2**70], "prompt")])
def test_tokens_outside_the_vocabulary_are_refused(prompt: Any, param: str) -> None:
    error = refused(prompt=prompt)
    assert (error["param"], error["code"]) == (param, "invalid_request")


@pytest.mark.parametrize(
    ("prompt", "param"), [("x" * 49, "prompt"), (["a", "x" * 60], "prompt[1]"), ([1] * 50, "prompt")]
)
def test_a_prompt_over_the_window_is_refused(prompt: Any, param: str) -> None:
    error = refused(prompt=prompt)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_a_prompt_may_fill_the_window_if_nothing_follows() -> None:
    assert complete(ScriptedWorker(window=50), prompt=[1] * 50, max_tokens=0, echo=True).status_code == 200
    assert complete(ScriptedWorker(window=50), prompt=[1] * 49, max_tokens=5).status_code == 200


@pytest.mark.parametrize(("prompts", "n"), [(2, 65), (128, 2), (129, 1), (1, 129)])
def test_too_many_choices_are_refused(prompts: int, n: int) -> None:
    assert refused(prompt=["a"] * prompts, n=n)["param"] in ("n", "prompt")


def test_as_many_choices_as_allowed_are_made() -> None:
    choices = complete(prompt=["a"] * 64, n=2).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(128))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("echo", "yes"),
        ("echo", 1),
        ("logprobs", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", 1.5),
        ("n", 0),
        ("temperature", 3),
        ("stop", [""]),
        ("speculation", {"speed": 1}),
        ("add_special_tokens", 0),
    ],
)
def test_wrong_values_name_their_field(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert str(error["param"]).startswith(name)
    assert error["message"].startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "end"),
        ("best_of", 3),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ],
)
def test_options_that_would_do_nothing_are_refused(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_prompt_logprobs_are_not_streamed() -> None:
    error = error_of(complete(prompt_logprobs=1, stream=True))
    assert (error["param"], error["code"]) == ("prompt_logprobs", "unsupported_parameter")


def test_null_and_neutral_values_ask_for_nothing() -> None:
    names = ["model", "max_tokens", "suffix", "best_of", "n", "echo", "logprobs", "prompt_logprobs", "stop", "user"]
    assert complete(**dict.fromkeys(names)).status_code == 200
    assert complete(suffix="", best_of=1, n=1, echo=False, tools=[]).status_code == 200


def test_the_options_reach_the_worker() -> None:
    worker = ScriptedWorker()
    complete(worker, seed=3, temperature=0.5, stop="x", logprobs=2, min_tokens=1, speculation={"enabled": False})
    asked = worker.requests[0]
    assert (asked.max_tokens, asked.stop, asked.logprobs, asked.prompt_logprobs) == (16, ("x",), 2, None)
    assert (asked.sampling.seed, asked.sampling.temperature, asked.speculation.enabled) == (3, 0.5, False)


def test_equal_prompts_without_a_seed_get_different_ones() -> None:
    worker = ScriptedWorker()
    complete(worker, prompt=["a", "a"])
    complete(worker, prompt=["a", "a"], seed=5)
    seeds = [request.sampling.seed for request in worker.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [5, 5]


def test_another_model_is_not_found_and_other_methods_are_not_allowed() -> None:
    assert error_of(complete(model="other"))["code"] == "model_not_found"
    assert send(ScriptedWorker(), "GET", TEXT).status_code == 405


def test_a_trajectory_is_named_by_its_header_or_made_up() -> None:
    worker = ScriptedWorker()
    named = post(worker, {"prompt": ["a", "b"], "n": 2}, {RUN: "run", "X-AgentSpec-Parent": "above"}, path=TEXT)
    assert named.headers[RUN] == "run"
    assert {(request.trajectory.id, request.trajectory.parent) for request in worker.requests} == {("run", "above")}
    assert complete(prompt_cache_key="key").headers[RUN] == "key"
    assert complete().headers[RUN] != complete().headers[RUN]


def test_the_report_is_attached_where_it_is_asked_for() -> None:
    body = complete(speculation={"report": True}).json()
    assert body["agentspec"]["drafted"] == {"trajectory": 4, "scope": 1}
    several = complete(prompt=["a", "b"], speculation={"report": True}).json()["agentspec"]
    assert [report["drafted_total"] for report in several["choices"]] == [5, 5]


ODD = "Grüße \U0001f680\r\n\x00 end "


@pytest.mark.parametrize(("prompt", "expected"), [(ODD, [ODD]), ([0, 1], ["Hello world"]), (["a", "é"], ["a", "é"])])
def test_echo_returns_the_prompt_byte_for_byte(prompt: Any, expected: list[str]) -> None:
    whole = complete(prompt=prompt, echo=True).json()["choices"]
    assert [choice["text"] for choice in whole] == [text + "Hello world" for text in expected]
    only = complete(prompt=prompt, echo=True, max_tokens=0).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in only["choices"]] == [
        (text, "length") for text in expected
    ]
    assert only["usage"]["completion_tokens"] == 0
    chunks = [chunk["choices"][0] for chunk in events(complete(prompt=prompt, echo=True, n=2, stream=True))]
    for index in range(2 * len(expected)):
        text = "".join(choice["text"] for choice in chunks if choice["index"] == index)
        assert text == expected[index // 2] + "Hello world"


def test_logprobs_are_parallel_lists() -> None:
    assert complete(logprobs=1).json()["choices"][0]["logprobs"] == {
        "tokens": ["Hello", " world"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"Hello": -0.5}, {" world": -0.5}],
        "text_offset": [0, 5],
    }
    assert complete(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [{"Hello": -0.5}, {" world": -0.5}]


def test_api_34_impossible_tokens_have_a_finite_logprob() -> None:
    response = complete(logprobs=3)
    json.loads(response.text, parse_constant=pytest.fail)
    assert response.json()["choices"][0]["logprobs"]["top_logprobs"][1] == {" world": -0.5, "bytes:\\xff": -9999.0}


def test_echo_and_logprobs_cover_the_prompt() -> None:
    found = complete(ScriptedWorker(script=["Hello", "é"]), prompt=[0, 1], echo=True, logprobs=1).json()["choices"][0]
    assert found["text"] == "HelloéHelloé"
    assert found["logprobs"] == {
        "tokens": ["Hello", "é", "Hello", "é"],
        "token_logprobs": [None, -9.0, -0.5, -0.5],
        "top_logprobs": [None, {"Hello": -0.25, "é": -9.0}, {"Hello": -0.5}, {"é": -0.5}],
        "text_offset": [0, 5, 6, 11],
    }


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}, {"echo": True, "n": 2}])
@pytest.mark.parametrize("prompt", ["hé", [0, 1]])
def test_a_stream_carries_the_logprobs_of_a_whole_answer(prompt: Any, fields: dict[str, Any]) -> None:
    def asked(stream: bool) -> httpx.Response:
        return complete(prompt=prompt, logprobs=2, stream=stream, **fields)

    whole = asked(False).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in events(asked(True))]
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        lists = [chunk["logprobs"] for chunk in mine if chunk["logprobs"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for part in lists for one in part[name]] == choice["logprobs"][name]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]


def test_prompt_logprobs_have_vllms_form() -> None:
    choices = complete(prompt=[3, 1, 9], prompt_logprobs=2, max_tokens=0, n=2).json()["choices"]
    first, second = {"logprob": -0.25, "rank": 1}, {"logprob": -1.25, "rank": 2}
    for choice in choices:
        assert choice["text"] == ""
        assert choice["prompt_logprobs"] == [
            None,
            {"1": {"logprob": -9.0, "rank": 7, "decoded_token": " world"}, "0": {**first, "decoded_token": "Hello"}},
            {
                "9": {"logprob": -9.0, "rank": 7, "decoded_token": "bytes:\\xff"},
                "0": {**first, "decoded_token": "Hello"},
                "1": {**second, "decoded_token": " world"},
            },
        ]
    assert "prompt_logprobs" not in complete().json()["choices"][0]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
def test_log_probabilities_of_too_many_tokens_are_refused(fields: dict[str, Any]) -> None:
    prompts = [[1] * 9000] * 3
    response = complete(prompt=prompts, **fields)
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    assert complete(prompt=prompts, logprobs=20).status_code == 200


def test_only_one_choice_computes_the_prompt_logprobs() -> None:
    worker = ScriptedWorker()
    complete(worker, prompt_logprobs=3, echo=True, logprobs=5, n=3)
    assert [request.prompt_logprobs for request in worker.requests] == [5, None, None]


def test_equal_prompts_share_their_log_probabilities() -> None:
    worker = ScriptedWorker()
    choices = complete(worker, prompt=[[0, 1], [5], [0, 1]], echo=True, logprobs=0, prompt_logprobs=0).json()["choices"]
    assert [request.prompt_logprobs for request in worker.requests] == [0, 0, None]
    assert {**choices[2], "index": 0} == choices[0]
    assert len(choices[0]["prompt_logprobs"]) == 2


EURO = [b"\xe2", b"\x82", b"\xac"]


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("a€b", [b"a", *EURO, b"b"], [0, 1, 1, 1, 2]),
        ("hi", [b"<s>", b" hi"], [0, 0]),
        ("<s>x", [b"<s>", b"x"], [0, 3]),
    ],
)
def test_a_token_begins_where_its_first_character_does(text: str, tokens: list[bytes], offsets: list[int]) -> None:
    speller = Speller(tokens.__getitem__, ())
    logprobs = [TokenLogprob(token, -1.0, (), 1) for token in range(1, len(tokens))]
    found = prompt_entries(speller, text.encode(), range(len(tokens)), logprobs, 0)
    assert [entry.offset for entry in found] == offsets
    assert b"".join(pieces_of(text.encode(), tokens)) == text.encode()


def test_tokens_that_give_no_text_take_no_room_in_it() -> None:
    spelled = {1: b"a", 2: b"<|end|>", 3: b"b"}
    speller = Speller(spelled.__getitem__, {2})
    entries = [speller.entry(TokenLogprob(token, -1.0, (), 1), 0) for token in (1, 2, 3)]
    assert [(entry.token, entry.offset) for entry in entries] == [("a", 0), ("<|end|>", 1), ("b", 1)]


def test_the_metrics_know_the_route() -> None:
    worker = ScriptedWorker()

    async def talk() -> str:
        async with client_of(worker) as client:
            await client.post(TEXT, json={"prompt": "a", "n": 2})
            await client.post(TEXT, json={"prompt": ""})
            return (await client.get("/metrics")).text

    lines = asyncio.run(talk()).splitlines()
    assert f'agentspec_http_requests_total{{route="{TEXT}",status="200"}} 1.0' in lines
    assert f'agentspec_http_requests_total{{route="{TEXT}",status="400"}} 1.0' in lines
    assert 'agentspec_generation_tokens_total{kind="completion"} 4.0' in lines
