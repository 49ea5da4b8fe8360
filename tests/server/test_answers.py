"""Whole answers and streams."""

import asyncio
import json
from typing import Any

import pytest

from agentspec.config import ServerConfig
from agentspec.errors import Overloaded, Unavailable
from agentspec.types import FinishReason
from tests.server.conftest import CHAT, HELLO, ScriptedWorker, ask, client_of, error_of, events, post, send

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALLS = [
    "Two calls.\n<tool",
    '_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"',
    "}</tool_call>",
]


def streamed_message(chunks: list[Any]) -> dict[str, Any]:
    """The message that a client puts together from chunks, by the index of each call."""
    message: dict[str, Any] = {"content": "", "calls": {}}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]):
        message["content"] += delta.get("content", "")
        for fragment in delta.get("tool_calls", []):
            call = message["calls"].setdefault(fragment["index"], {"ids": [], "names": [], "arguments": ""})
            call["ids"] += [fragment["id"]] if "id" in fragment else []
            call["names"] += [fragment["function"]["name"]] if "name" in fragment["function"] else []
            call["arguments"] += fragment["function"].get("arguments", "")
    return message


def test_a_whole_answer() -> None:
    response = post(ScriptedWorker(script=["Hé", "llo"]), ask(model="served"))
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "served")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Héllo"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert body["timings"] == {
        "prompt_n": 3,
        "prompt_ms": 10.0,
        "predicted_n": 2,
        "predicted_ms": 20.0,
        "draft_n": 5,
        "draft_n_accepted": 3,
    }
    assert "agentspec" not in body
    assert "Héllo".encode() in response.content


def test_the_whole_report_on_request() -> None:
    response = post(ScriptedWorker(), ask(speculation={"report": True}))
    report = response.json()["agentspec"]
    assert report["trajectory"] == response.headers["x-agentspec-trajectory"]
    assert report["drafted"] == {"trajectory": 4, "scope": 1}
    assert report["token_ids"] == [1, 2, 3]
    assert report["reason"] is None
    last = events(post(ScriptedWorker(), ask(stream=True, speculation={"report": True})))[-1]
    assert last["agentspec"]["drafted_total"] == 5


@pytest.mark.parametrize("report", [False, True])
def test_api_01_a_usage_chunk_is_last_and_has_no_choices(report: bool) -> None:
    body = ask(stream=True, stream_options={"include_usage": True}, speculation={"report": report})
    *others, finish, usage = events(post(ScriptedWorker(), body))
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7
    assert usage["timings"]["draft_n_accepted"] == 3
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert [chunk["usage"] for chunk in [*others, finish]] == [None] * (len(others) + 1)
    assert ("agentspec" in usage) is report


def test_api_02_no_usage_chunk_unless_asked() -> None:
    chunks = events(post(ScriptedWorker(), ask(stream=True)))
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["timings"]["predicted_n"] == 2


def test_api_04_one_identity_for_the_whole_stream_and_no_filler() -> None:
    worker = ScriptedWorker(script=["Hel", "", "lo"])
    response = post(worker, ask(stream=True, stream_options={"include_usage": True}))
    chunks = events(response)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["model"] == "served"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]


def test_line_separators_are_escaped_in_streams() -> None:
    text = "a\u2028b\u2029c\x85d\r\n"
    response = post(ScriptedWorker(script=[text]), ask(stream=True))
    assert streamed_message(events(response))["content"] == text
    assert len(response.text.splitlines()) == response.text.count("\n")


def test_api_16_parallel_calls_have_their_own_index_and_id() -> None:
    message = streamed_message(events(post(ScriptedWorker(script=CALLS), ask(stream=True, tools=TOOLS))))
    assert message["content"] == "Two calls."
    assert [call["names"] for call in message["calls"].values()] == [["f"], ["g"]]
    assert [call["arguments"] for call in message["calls"].values()] == ['{"a": 1}', "{}"]
    assert list(message["calls"]) == [0, 1]


def test_api_17_the_id_comes_once_per_call() -> None:
    message = streamed_message(events(post(ScriptedWorker(script=CALLS), ask(stream=True, tools=TOOLS))))
    ids = [call["ids"] for call in message["calls"].values()]
    assert [len(of_call) for of_call in ids] == [1, 1]
    assert ids[0] != ids[1]


def test_calls_in_a_whole_answer() -> None:
    choice = post(ScriptedWorker(script=CALLS), ask(tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Two calls."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert [call["type"] for call in calls] == ["function", "function"]


def test_content_is_null_when_there_are_only_calls() -> None:
    choice = post(ScriptedWorker(script=CALLS[1:]), ask(tools=TOOLS)).json()["choices"][0]
    assert choice["message"]["content"] == '_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    only = post(ScriptedWorker(script=['\n<tool_call>{"name": "f"}</tool_call>\n']), ask(tools=TOOLS)).json()
    assert only["choices"][0]["message"]["content"] is None


def test_a_call_cut_by_the_limit_still_ends_by_length() -> None:
    worker = ScriptedWorker(script=CALLS, finish=FinishReason.LENGTH)
    chunks = events(post(worker, ask(stream=True, tools=TOOLS)))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_str_11_the_end_of_the_text_takes_the_same_way() -> None:
    chunks = events(post(ScriptedWorker(script=["a <tool", "_ca"]), ask(stream=True, tools=TOOLS)))
    assert streamed_message(chunks) == {"content": "a <tool_ca", "calls": {}}


def test_markup_is_plain_text_without_tools() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert streamed_message(events(post(ScriptedWorker(script=[text]), ask(stream=True))))["content"] == text


@pytest.mark.parametrize("stream", [False, True])
def test_api_26_and_28_a_prompt_over_the_window_is_a_400(stream: bool) -> None:
    response = post(ScriptedWorker(window=5), ask(stream=stream))
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "wait"), [(Overloaded("full"), 429, "1"), (Unavailable("gone"), 503, "5")]
)
def test_prx_11_refusals_say_when_to_come_back(failure: Exception, status: int, wait: str, stream: bool) -> None:
    response = post(ScriptedWorker(failure=failure), ask(stream=stream))
    assert response.status_code == status
    assert response.headers["retry-after"] == wait
    assert error_of(response)["code"] in ("overloaded", "unavailable")


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_tells_nothing(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    response = post(ScriptedWorker(failure=ZeroDivisionError("secret")), ask(stream=stream))
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    assert "secret" in caplog.text


def test_api_26_an_error_in_a_stream_is_one_event_and_the_end() -> None:
    worker = ScriptedWorker(failure=Unavailable("gone"), fail_after=1)
    response = post(worker, ask(stream=True))
    assert response.status_code == 200
    *_, text, last = [frame for frame in response.text.split("\n\n") if frame]
    assert json.loads(text.removeprefix("data: "))["choices"][0]["delta"] == {"content": "Hello"}
    assert json.loads(last.removeprefix("data: ")) == {
        "error": {"message": "gone", "type": "service_unavailable_error", "param": None, "code": "unavailable"}
    }
    assert worker.running == 0


def test_an_error_after_half_a_whole_answer_is_still_a_status() -> None:
    assert post(ScriptedWorker(failure=Unavailable("gone"), fail_after=1), ask()).status_code == 503


def test_a_silent_stream_gets_comments() -> None:
    async def ask_slow(script: list[str], keepalive_s: float) -> str:
        worker = ScriptedWorker(script=script, delay_s=0.06)
        async with client_of(worker, ServerConfig(keepalive_s=keepalive_s)) as client:
            return (await client.post(CHAT, json=ask(stream=True, tools=TOOLS))).text

    silent = asyncio.run(ask_slow(["a"], 0.02))
    assert silent.startswith(": keep-alive\n\n")
    assert silent.endswith("data: [DONE]\n\n")
    holding = asyncio.run(ask_slow(["a<tool_call>", "b", "c", "d"], 0.1))
    assert not holding.startswith(":")
    assert ": keep-alive\n\n" in holding
    assert ":" not in {frame[0] for frame in asyncio.run(ask_slow(["a"], 0)).split("\n\n") if frame}


def test_requests_at_once_do_not_mix() -> None:
    async def many() -> list[str]:
        worker = ScriptedWorker(script=["x", "y"], delay_s=0.001)
        async with client_of(worker) as client:
            answers = await asyncio.gather(*(client.post(CHAT, json=ask(max_tokens=1 + i % 2)) for i in range(20)))
        return [answer.json()["choices"][0]["message"]["content"] for answer in answers]

    assert asyncio.run(many()) == ["x", "xy"] * 10


def test_models() -> None:
    worker = ScriptedWorker(model="org/name")
    (listed,) = send(worker, "GET", "/v1/models").json()["data"]
    assert (listed["id"], listed["object"], listed["context_window"]) == ("org/name", "model", 10_000)
    assert send(worker, "GET", "/v1/models/org/name").json()["id"] == "org/name"
    response = send(worker, "GET", "/v1/models/other")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", CHAT, 405, "method_not_allowed"),
    ],
)
def test_routing_errors_have_the_envelope(method: str, path: str, status: int, code: str) -> None:
    response = send(ScriptedWorker(), method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert status != 405 or response.headers["allow"]


def test_health_and_ready() -> None:
    assert send(ScriptedWorker(), "GET", "/health").json() == {"status": "ok"}
    assert send(ScriptedWorker(), "GET", "/ready").json() == {"status": "ready"}


def test_metrics_count_what_happened() -> None:
    async def scrape() -> list[str]:
        async with client_of(ScriptedWorker()) as client:
            await client.post(CHAT, json=ask(stream=True))
            await client.post(CHAT, json={"messages": HELLO, "n": 0})
            await client.get("/made/up")
            await client.get("/v1/models/some/other")
            await client.get("/v1/trajectories/a/b")
            await client.delete("/v1/trajectories/c")
            return (await client.get("/metrics")).text.splitlines()

    lines = asyncio.run(scrape())
    for line in [
        'agentspec_http_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'agentspec_http_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        'agentspec_http_requests_total{route="other",status="404"} 1.0',
        'agentspec_http_requests_total{route="/v1/models/{name}",status="404"} 1.0',
        'agentspec_http_requests_total{route="/v1/trajectories/{id}",status="404"} 2.0',
        "# HELP agentspec_steps_total Passes of the model.",
        'agentspec_generation_tokens_total{kind="completion"} 2.0',
        'agentspec_generation_accepted_tokens_total{source="trajectory"} 3.0',
        "agentspec_generation_time_to_first_token_seconds_count 1.0",
        "agentspec_generation_decode_seconds_sum 0.02",
        "# TYPE agentspec_steps_total counter",
        "agentspec_steps_total 7.0",
        "# TYPE agentspec_running gauge",
        "agentspec_http_requests_running 1.0",
    ]:
        assert line in lines, line


def entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = choice["logprobs"]["content"]
    return found


def test_api_32_logprobs_without_top_logprobs_have_empty_lists() -> None:
    choice = post(ScriptedWorker(), ask(logprobs=True)).json()["choices"][0]
    assert entries(choice) == [
        {"token": "Hello", "logprob": -0.5, "bytes": [72, 101, 108, 108, 111], "top_logprobs": []},
        {"token": " world", "logprob": -0.5, "bytes": [32, 119, 111, 114, 108, 100], "top_logprobs": []},
    ]
    assert post(ScriptedWorker(), ask()).json()["choices"][0]["logprobs"] is None


def test_api_34_impossible_tokens_have_a_finite_logprob() -> None:
    response = post(ScriptedWorker(), ask(logprobs=True, top_logprobs=3))
    json.loads(response.text, parse_constant=pytest.fail)
    tops = entries(response.json()["choices"][0])[1]["top_logprobs"]
    assert [top["logprob"] for top in tops] == [-0.5, -9999.0, -9999.0]
    assert (tops[1]["token"], tops[1]["bytes"]) == ("\ufffd", [255])


@pytest.mark.parametrize("script", [["Hello", " world"], ["", "Hé", "", "llo"], CALLS])
def test_a_stream_carries_the_logprobs_of_every_token(script: list[str]) -> None:
    fields = ask(logprobs=True, top_logprobs=2, tools=TOOLS)
    whole = post(ScriptedWorker(script=script), fields).json()["choices"][0]
    chunks = events(post(ScriptedWorker(script=script), {**fields, "stream": True}))
    streamed = [entry for chunk in chunks if chunk["choices"][0]["logprobs"] for entry in entries(chunk["choices"][0])]
    assert streamed == entries(whole)
    assert len(streamed) == len(script)
