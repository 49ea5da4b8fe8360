"""The whole stack on a tiny model: HTTP in front, histories and verification behind."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.config import ServerConfig
from agentspec.engine.service import Engine
from agentspec.server.run import serve_in_thread
from tests.serving import HTTP, engine_on, in_process

CHAT = "/v1/chat/completions"
RUN = "X-AgentSpec-Trajectory"


@pytest.fixture
def url(tiny_model: Path) -> Iterator[str]:
    """A server on a socket, two requests at a time, slow enough to be left before it is done."""
    engine = engine_on(tiny_model, max_running=2)
    step = engine.loop.step

    def slow_step() -> None:
        time.sleep(0.004)
        step()

    engine.loop.step = slow_step  # type: ignore[method-assign]
    with serve_in_thread(engine, ServerConfig(keepalive_s=30)) as found:
        yield found


def ask(*texts: str, **fields: Any) -> dict[str, Any]:
    """A greedy request whose messages alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    fields.setdefault("max_tokens", 24)
    fields.setdefault("temperature", 0)
    return {"messages": messages, **fields}


def drafts(**fields: Any) -> dict[str, Any]:
    return {"speculation": {"report": True, **fields}}


@dataclass
class Answer:
    """An answer, whole or put together from a stream."""

    text: str
    finish: str
    usage: dict[str, Any]
    report: dict[str, Any] | None
    trajectory: str


async def whole(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> Answer:
    response = await client.post(CHAT, json=body, headers=headers)
    assert response.status_code == 200, response.text
    content = response.json()
    choice = content["choices"][0]
    report = content.get("agentspec")
    return Answer(
        choice["message"]["content"], choice["finish_reason"], content["usage"], report, response.headers[RUN]
    )


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> Answer:
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", CHAT, json=wanted, headers=headers) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    *chunks, last = [json.loads(line) for line in lines[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    finish = chunks[-1]["choices"][0]["finish_reason"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert last["choices"] == []
    return Answer(text, finish, last["usage"], last.get("agentspec"), response.headers[RUN])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}])
def test_a_stream_says_what_a_whole_answer_says(tiny_model: Path, sampling: dict[str, Any]) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        body = ask("Tell me about tellers. Tell me.", **sampling)
        plain = await whole(client, body | {"speculation": {"enabled": False}}, **{RUN: "a"})
        for again in (await streamed(client, body, **{RUN: "b"}), await whole(client, body, **{RUN: "b"})):
            assert (again.text, again.finish) == (plain.text, plain.finish)
            for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert again.usage[count] == plain.usage[count]

    in_process(tiny_model, scenario)


def test_the_report_says_where_tokens_came_from(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        body = ask("Tell me about tellers.", **drafts())
        first = await whole(client, body, **{RUN: "run"})
        report = (await whole(client, body, **{RUN: "run", "X-AgentSpec-Parent": "above"})).report
        assert report is not None and first.report is not None
        assert (report["trajectory"], report["parent"]) == ("run", "above")
        assert report["token_ids"] == first.report["token_ids"]
        assert report["completion_tokens"] == len(report["token_ids"]) > report["steps"]
        assert report["accepted_total"] >= report["completion_tokens"] - report["steps"] > 0
        assert report["drafted_total"] >= report["accepted_total"]
        assert sum(report["accepted"].values()) == report["accepted_total"]
        assert sum(report["drafted"].values()) == report["drafted_total"]
        assert report["reason"] is None
        assert report["decode_s"] > report["draft_s"] > 0

    in_process(tiny_model, scenario)


def test_without_being_asked_there_is_no_report(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        assert (await whole(client, ask("hi"))).report is None
        assert (await streamed(client, ask("hi"))).report is None

    in_process(tiny_model, scenario)


@pytest.mark.parametrize("named", [True, False])
def test_a_second_turn_reuses_keys_and_drafts_from_the_first(tiny_model: Path, named: bool) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        headers = {RUN: "agent-7"} if named else {}
        first = await whole(client, ask("Say it.", **drafts()), **headers)
        follow = ask("Say it.", first.text, "Say it.", **drafts(drafters=["trajectory"]))
        second = await streamed(client, follow, **headers)
        assert second.trajectory == first.trajectory
        assert second.usage["prompt_tokens_details"]["cached_tokens"] >= first.usage["prompt_tokens"]
        assert second.report is not None
        assert second.report["drafted"]["trajectory"] > 0
        assert second.report["drafted"].get("scope", 0) == 0
        apart = await whole(client, follow | {"speculation": {"enabled": False}}, **{RUN: "apart"})
        assert apart.text == second.text

    in_process(tiny_model, scenario)


def test_another_conversation_is_another_trajectory(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        first = await whole(client, ask("one thing"))
        fork = await whole(client, ask("one thing", "another answer", "more", **drafts()))
        other = await whole(client, ask("quite another thing"))
        assert len({first.trajectory, other.trajectory}) == 2
        assert fork.trajectory == first.trajectory

    in_process(tiny_model, scenario)


def test_four_streams_at_once_say_what_each_says_alone(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        bodies = [ask(f"client {n} counts {n} {n} {n}", **drafts()) for n in range(4)]
        alone = [await streamed(client, body, **{RUN: f"alone {n}"}) for n, body in enumerate(bodies)]
        together = await asyncio.gather(
            *(streamed(client, body, **{RUN: f"together {n}"}) for n, body in enumerate(bodies))
        )
        assert [(a.text, a.finish) for a in together] == [(a.text, a.finish) for a in alone]
        assert len({answer.text for answer in alone}) == 4

    in_process(tiny_model, scenario)


def running(url: str) -> tuple[float, float]:
    """Requests in the batch and in the queue."""
    found = metrics(HTTP.get(url + "/metrics").text)
    return found["agentspec_running_requests"], found["agentspec_waiting_requests"]


def metrics(text: str) -> dict[str, float]:
    """Values by name and labels."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def freed_within_a_second(url: str) -> bool:
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        if running(url) == (0, 0):
            return True
        time.sleep(0.01)
    return False


LONG = {"max_tokens": 400, "speculation": {"enabled": False}, "stream": True}


def test_prx_05_leaving_in_mid_stream_frees_the_place(url: str) -> None:
    for n in range(3):
        with HTTP.stream("POST", url + CHAT, json=ask(f"stream {n}", **LONG)) as response:
            lines = response.iter_lines()
            seen = [next(lines) for _ in range(5)]
            assert running(url)[0] == 1
        assert seen[0].startswith("data: ")
        assert freed_within_a_second(url)
    assert HTTP.post(url + CHAT, json=ask("still there?")).json()["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stream", [True, False])
def test_prx_02_leaving_before_the_first_token_frees_the_place(url: str, stream: bool) -> None:
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(HTTP.stream("POST", url + CHAT, json=ask(f"busy {n}", **LONG))) for n in range(2)]
        lines = [response.iter_lines() for response in busy]
        assert all(next(each).startswith("data: ") for each in lines)
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(url + CHAT, json=ask("patience", stream=stream), timeout=0.1)
    assert freed_within_a_second(url)
    assert HTTP.post(url + CHAT, json=ask("next")).status_code == 200


def nested(levels: int) -> bytes:
    return b'{"messages":' + b"[" * levels + b"]" * levels + b"}"


HELLO = b'"messages":[{"role":"user","content":"hi"}]'
OVER = [{"role": "user", "content": "x" * 600}]
BAD: dict[str, tuple[bytes | dict[str, Any], int, str]] = {
    "cut JSON": (b'{"messages": [', 400, "invalid_request"),
    "no object": (b"[]", 400, "invalid_request"),
    "nothing": (b"", 400, "invalid_request"),
    "binary junk": (bytes(range(256)), 400, "invalid_request"),
    "not a number": (b"{" + HELLO + b',"temperature":NaN}', 400, "invalid_request"),
    "deep": (nested(50_000), 400, "invalid_request"),
    "deep within the parser's reach": (nested(500), 400, "invalid_request"),
    "huge exponent": (b"{" + HELLO + b',"temperature":1e999}', 400, "invalid_request"),
    "huge integer": (b"{" + HELLO + b',"max_tokens":-' + b"9" * 400 + b"}", 400, "invalid_request"),
    "too many digits": (b"{" + HELLO + b',"max_tokens":' + b"9" * 9000 + b"}", 400, "invalid_request"),
    "half a surrogate": (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, "invalid_request"),
    "no messages": ({}, 400, "invalid_request"),
    "empty messages": ({"messages": []}, 400, "invalid_request"),
    "negative cap": (ask("hi", max_tokens=-1), 400, "invalid_request"),
    "cap of zero": (ask("hi", max_tokens=0), 400, "invalid_request"),
    "cap of zero, streaming": (ask("hi", max_tokens=0, stream=True), 400, "invalid_request"),
    "unknown model": (ask("hi", model="gpt-unknown"), 404, "model_not_found"),
    "over the window": ({"messages": OVER}, 400, "context_length_exceeded"),
    "over the window, streaming": ({"messages": OVER, "stream": True}, 400, "context_length_exceeded"),
    "a megabyte of text": (ask("y" * 1_000_000), 400, "context_length_exceeded"),
    "over the body limit": (b" " * 2_100_000, 413, "body_too_large"),
    "an unknown drafter": (ask("hi", speculation={"drafters": ["oracle"]}), 400, "invalid_request"),
    "penalty": (ask("hi", frequency_penalty=2.5), 400, "invalid_request"),
    "a bias of no token": (ask("hi", logit_bias={"100000": 1}), 400, "invalid_request"),
    "a bias of no token, streaming": (ask("hi", logit_bias={"100000": 1}, stream=True), 400, "invalid_request"),
    "no such stop token": (ask("hi", stop_token_ids=[2**70]), 400, "invalid_request"),
    "a minimum above the maximum": (ask("hi", min_tokens=9, max_tokens=8), 400, "invalid_request"),
    "a format nobody knows": (ask("hi", response_format={"type": "yaml"}), 400, "unsupported_parameter"),
    "a keyword out of reach": (ask("hi", guided_json={"uniqueItems": True}), 400, "invalid_request"),
    "a schema elsewhere": (ask("hi", guided_json={"$ref": "https://example.com/x"}), 400, "invalid_request"),
    "a schema of a megabyte": (ask("hi", guided_json={"enum": ["y" * 1_000_000]}), 400, "invalid_request"),
    "no regex": (ask("hi", guided_regex="("), 400, "invalid_request"),
    "no regex, streaming": (ask("hi", guided_regex="(", stream=True), 400, "invalid_request"),
}


def test_constrained_output_over_http_is_the_same_with_drafts_and_without(tiny_model: Path) -> None:
    fields = {"conclusion": {"enum": [1, 22, 333]}, "because": {"const": "it was asked for"}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        reports = []
        for enabled in (False, True):
            wish = {"enabled": enabled, "report": True}
            body = ask("hi", max_tokens=400, temperature=1, seed=3, response_format=form, speculation=wish)
            answer = (await client.post(CHAT, json=body)).json()
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "stop"
            found = json.loads(choice["message"]["content"])
            assert found["conclusion"] in (1, 22, 333) and found["because"] == "it was asked for"
            reports.append(answer["agentspec"])
        off, on = reports
        assert on["token_ids"] == off["token_ids"]
        assert on["accepted"]["grammar"] > 30 and on["steps"] < off["steps"] - 30

    in_process(tiny_model, scenario, ServerConfig())


def test_options_of_the_sampler_work_over_http(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        fields: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, "frequency_penalty": 1.5}
        stops: list[dict[str, Any]] = [{}, {"logit_bias": {"65": 100}, "stop_token_ids": [65], "min_tokens": 4}]
        for stop in stops:
            body = (await client.post(CHAT, json=ask("hi", **fields, **stop))).json()
            choice = body["choices"][0]
            entries = choice["logprobs"]["content"]
            assert len(entries) == body["usage"]["completion_tokens"] == (5 if stop else 12)
            assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)
            spelled = bytes(byte for entry in entries[: 4 if stop else 12] for byte in entry["bytes"])
            assert choice["message"]["content"] == spelled.decode("utf-8", "replace")
            assert choice["finish_reason"] == ("stop" if stop else "length")

    in_process(tiny_model, scenario, ServerConfig())


def test_bad_input_gets_its_envelope_and_the_next_request_its_answer(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        expected = (await whole(client, ask("good"))).text
        for name, (body, status, code) in BAD.items():
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            refused = await client.post(CHAT, content=content)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), name
            assert set(refused.json()["error"]) == {"message", "type", "param", "code"}, name
            assert (await whole(client, ask("good"))).text == expected, name
        assert engine.stats()["history_sessions"] == engine.stats()["running_requests"] == 0

    in_process(tiny_model, scenario, ServerConfig(max_body_bytes=2_000_000))


HUGE: list[dict[str, Any]] = [
    {"top_k": 10**30, "temperature": 1},
    {"seed": -(10**40), "temperature": 1},
    {"temperature": 5e-324},
    {"temperature": 1e-300, "top_p": 1e-300},
    {"temperature": 2, "min_p": 1},
    {"speculation": {"max_draft_tokens": 10**30}},
    {"stop": ["x" * 100_000] * 16},
    {"user": "u" * 100_000},
]


def test_api_22_extreme_values_get_an_answer_and_harm_no_neighbour(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        calm = ask("calm", max_tokens=40)
        expected = (await whole(client, calm)).text
        answers = await asyncio.gather(*(whole(client, body) for body in [calm, *(ask("hi", **odd) for odd in HUGE)]))
        assert answers[0].text == expected
        assert all(answer.usage["completion_tokens"] > 0 for answer in answers)

    in_process(tiny_model, scenario, max_running=len(HUGE) + 1)


@pytest.mark.parametrize("cap", [10**6, 10**30])
def test_api_29_a_huge_cap_is_cut_to_the_window(tiny_model: Path, cap: int) -> None:
    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        answer = await whole(client, ask("x" * 450, max_tokens=cap))
        assert answer.usage["total_tokens"] <= engine.window
        assert answer.finish == ("length" if answer.usage["total_tokens"] == engine.window else "stop")

    in_process(tiny_model, scenario)


def test_api_28_the_prompt_may_leave_room_for_one_token(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, engine: Engine) -> None:
        frame = (await whole(client, ask("x"))).usage["prompt_tokens"] - 1
        fits = await whole(client, ask("x" * (engine.window - frame - 1)))
        assert (fits.usage["completion_tokens"], fits.usage["total_tokens"]) == (1, engine.window)
        for stream in (True, False):
            over = await client.post(CHAT, json=ask("x" * (engine.window - frame), stream=stream))
            assert (over.status_code, over.json()["error"]["code"]) == (400, "context_length_exceeded")

    in_process(tiny_model, scenario)


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_api_31_accepted_runs_never_pass_the_cap(tiny_model: Path, cap: int) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        full = await whole(client, ask("Say it.", **drafts()), **{RUN: "r"})
        again = await whole(client, ask("Say it.", max_tokens=cap, **drafts()), **{RUN: "r"})
        assert full.report is not None and again.report is not None
        assert again.report["token_ids"] == full.report["token_ids"][:cap]
        assert (again.usage["completion_tokens"], again.finish) == (cap, "length")

    in_process(tiny_model, scenario)


def test_the_metrics_move_with_the_requests(tiny_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient, _: Engine) -> None:
        before = metrics((await client.get("/metrics")).text)
        answers = [await whole(client, ask("count me"), **{RUN: "m"}) for _ in range(2)]
        await client.post(CHAT, content=b"{")
        after = metrics((await client.get("/metrics")).text)

        def moved(name: str) -> float:
            return after[name] - before.get(name, 0)

        made = sum(answer.usage["completion_tokens"] for answer in answers)
        assert moved('agentspec_generation_tokens_total{kind="completion"}') == made
        assert moved('agentspec_generation_accepted_tokens_total{source="trajectory"}') > 0
        assert moved(f'agentspec_http_requests_total{{route="{CHAT}",status="200"}}') == 2
        assert moved(f'agentspec_http_requests_total{{route="{CHAT}",status="400"}}') == 1
        assert 0 < moved("agentspec_steps_total") < made
        assert moved("agentspec_generation_time_to_first_token_seconds_count") == 2
        assert after["agentspec_kv_used_bytes"] > 0 and after["agentspec_history_trajectories"] == 1
        assert after["agentspec_running_requests"] == after["agentspec_history_sessions"] == 0

    in_process(tiny_model, scenario)


def test_eng_22_a_neighbour_that_leaves_changes_nothing(url: str) -> None:
    body = ask("steady", temperature=1.0, seed=11, max_tokens=200)
    alone = HTTP.post(url + CHAT, json=body).json()["choices"][0]["message"]["content"]
    with HTTP.stream("POST", url + CHAT, json=ask("noise", **LONG)) as response:
        noise = response.iter_lines()
        next(noise)
        with HTTP.stream("POST", url + CHAT, json=body | {"stream": True}) as mine:
            lines = mine.iter_lines()
            first = next(lines)
            response.close()
            rest = [line for line in lines if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in (first, *rest)]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == alone
