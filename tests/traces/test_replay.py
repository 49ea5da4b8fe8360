"""Replays against a made-up server: what is sent, what is measured, what is refused."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from agentspec.errors import ReplayError
from agentspec.traces.options import ReplayOptions
from agentspec.traces.replay import Replayed, base_url, replay, trajectory_id
from agentspec.traces.report import report_of
from agentspec.traces.schema import Trace, parse_trace

OFF_S_PER_TOKEN, ON_S_PER_TOKEN = 0.04, 0.01


def trace(identifier: str, turns: int = 2, **more: Any) -> Trace:
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are {identifier}."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} ü"})
        messages.append({"role": "assistant", "content": f"answer {turn}", "reasoning_content": "secret"})
    return parse_trace({"id": identifier, "source": "demo", "domain": "swe", "messages": messages, **more})


class Pieces(httpx.AsyncByteStream):
    """A body that arrives in pieces; an exception among them breaks the connection."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            await asyncio.sleep(0)
            if isinstance(piece, Exception):
                raise piece
            yield piece


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
DONE = b"data: [DONE]\n\n"


class FakeServer:
    """Answers `tokens` tokens a turn, four to a step when speculating, with times that are made up.

    `broken` may answer a request in place of the fake; `extension` is whether it knows the speculation object.
    """

    def __init__(self, *, tokens: int = 9, extension: bool = True) -> None:
        self.tokens = tokens
        self.extension = extension
        self.bodies: list[bytes] = []
        self.headers: list[httpx.Headers] = []
        self.active = self.most_active = 0
        self.broken: Callable[[dict[str, Any]], httpx.Response | None] = lambda body: None
        self.token_ids: Callable[[bool], list[int]] = lambda enabled: list(range(self.tokens))

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.answer)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "fake-model"}]})
        assert request.url.path == "/v1/chat/completions"
        self.bodies.append(request.content)
        self.headers.append(request.headers)
        body = json.loads(request.content)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        await asyncio.sleep(0.001)
        self.active -= 1
        return self.broken(body) or streamed(*self.pieces(body))

    def pieces(self, body: dict[str, Any]) -> Iterator[bytes]:
        """The stream of an answer, cut inside a character."""
        enabled = body["speculation"]["enabled"]
        text = delta(content="é " * self.tokens)
        cut = text.index(b"\xc3") + 1
        yield delta(role="assistant", content="") + text[:cut]
        yield text[cut:]
        yield FINISH
        last: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": self.tokens}}
        last["usage"]["prompt_tokens_details"] = {"cached_tokens": 8}
        if self.extension:
            last["agentspec"] = self.report(enabled)
        yield event(last) + DONE

    def report(self, enabled: bool) -> dict[str, Any]:
        steps = -(-self.tokens // 4) if enabled else self.tokens
        return {
            "steps": steps,
            "drafted": {"trajectory": 12, "scope": 3} if enabled else {},
            "accepted": {"trajectory": 5, "scope": 2} if enabled else {},
            "drafted_total": 14 if enabled else 0,
            "accepted_total": 6 if enabled else 0,
            "queue_s": 0.5,
            "prefill_s": 0.25,
            "decode_s": self.tokens * (ON_S_PER_TOKEN if enabled else OFF_S_PER_TOKEN),
            "draft_s": 0.125,
            "token_ids": self.token_ids(enabled),
        }


def streamed(*pieces: bytes | Exception) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"}, stream=Pieces(*pieces))


def run(server: FakeServer, traces: list[Trace], **options: Any) -> Replayed:
    return asyncio.run(replay(traces, "http://fake/v1", ReplayOptions(**options), transport=server.transport))


def figures(server: FakeServer, traces: list[Trace], **options: Any) -> dict[str, Any]:
    return report_of(run(server, traces, **options), ReplayOptions(**options), "agentspec replay")


def test_every_generated_turn_is_asked_for_with_the_recorded_messages_before_it() -> None:
    server = FakeServer()
    tools = [{"type": "function", "function": {"name": "look"}}]
    recorded = trace("a", turns=3, tools=tools, meta={"generated": [2, 6]})
    run(server, [recorded], max_tokens=7, temperature=0.5, top_p=0.9, sampling_seed=3)
    first, second = (json.loads(body) for body in server.bodies)
    without_reasoning = [
        {name: value for name, value in message.items() if name != "reasoning_content"} for message in recorded.messages
    ]
    assert (first["messages"], second["messages"]) == (without_reasoning[:2], without_reasoning[:6])
    assert {name: value for name, value in first.items() if name != "messages"} == {
        "model": "fake-model",
        "tools": tools,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": True, "report": True},
    }


def test_turns_of_a_trajectory_share_an_id_that_is_new_in_every_run() -> None:
    server = FakeServer()
    traces = [trace("demo/a"), trace("demo/ü")]
    run(server, traces)
    run(server, traces)
    names = [headers["x-agentspec-trajectory"] for headers in server.headers]
    assert names[0] == names[1] != names[2] == names[3] != names[4]
    assert names[0].endswith("/demo/a") and names[4].endswith("/demo/a")
    assert all(name.isascii() and len(name) < 200 for name in names)
    assert len(set(names)) == 4


def test_trajectory_ids_are_distinct_and_bounded() -> None:
    long = [trajectory_id("n", "x" * 300 + end) for end in ("a", "b")]
    assert long[0] != long[1] and max(map(len, long)) < 200
    assert trajectory_id("n", "a b") == "n/a b"
    assert trajectory_id("n", "tab\t").isprintable()


def test_trc_07_arms_send_the_same_bytes_but_for_speculation() -> None:
    server = FakeServer()
    replayed = run(
        server, [trace("a", tools=[{"type": "function", "function": {"name": "speculation"}}])], baseline=True
    )
    on, off = b',"speculation":{"enabled":true,"report":true}}', b',"speculation":{"enabled":false,"report":true}}'
    assert [body.endswith(on) for body in server.bodies] == [False, True, True, False]
    rests = [body.removesuffix(on).removesuffix(off) for body in server.bodies]
    assert rests[0] == rests[1] != rests[2] == rests[3]
    digests = [turn.digest for turn in replayed.trajectories["a"]]
    assert digests == [hashlib.sha256(rest).hexdigest() for rest in (rests[0], rests[2])]


def test_baseline_report_has_ratio_identity_and_sums() -> None:
    report = figures(FakeServer(), [trace("a"), trace("b", turns=1)], baseline=True)
    expected = {
        "turns": 3,
        "trajectories": 2,
        "prompt_tokens": 120,
        "cached_tokens": 24,
        "tokens": 27,
        "steps": 9,
        "tokens_per_step": 3.0,
        "decode_tokens_per_s": 100.0,
        "baseline_decode_tokens_per_s": 25.0,
        "speed_ratio": 4.0,
        "speed_ratio_interval": [4.0, 4.0],
        "identical_turns": 3,
        "different": [],
        "drafted": {"scope": 9, "trajectory": 36},
        "accepted": {"scope": 6, "trajectory": 15},
        "drafted_total": 42,
        "accepted_total": 18,
        "queue_s": 1.5,
        "prefill_s": 0.75,
        "decode_s": 0.27,
        "draft_s": 0.375,
        "skipped": 0,
        "model": "fake-model",
        "command": "agentspec replay",
    }
    assert {name: report[name] for name in expected} == expected
    assert [(row["id"], row["turns"], row["speed_ratio"]) for row in report["per_trajectory"]] == [
        ("a", 2, 4.0),
        ("b", 1, 4.0),
    ]
    assert report["settings"]["baseline"] is True and report["settings"]["max_tokens"] == 96
    assert json.loads(json.dumps(report)) == report


def test_different_tokens_are_counted_and_located() -> None:
    server = FakeServer()
    server.token_ids = lambda enabled: [1, 2, 3] if enabled else [1, 2, 4]
    report = figures(server, [trace("a", turns=1)], baseline=True)
    assert report["identical_turns"] == 0
    assert report["different"] == [{"trajectory": "a", "message": 2, "first_different_token": 2}]


@pytest.mark.parametrize(("speculation", "steps"), [(True, 3), (False, 9)])
def test_single_arm_has_no_ratio(speculation: bool, steps: int) -> None:
    report = figures(FakeServer(), [trace("a", turns=1)], speculation=speculation)
    assert (report["steps"], report["speed_ratio"], report["identical_turns"]) == (steps, None, None)
    assert report["speed_ratio_interval"] is None


def test_server_without_the_extension_is_timed_by_the_client() -> None:
    server = FakeServer(extension=False)
    report = figures(server, [trace("a", turns=1)], baseline=True)
    assert (report["tokens"], report["steps"], report["accepted"], report["decode_s"]) == (9, None, None, None)
    assert report["identical_turns"] == 1


def test_one_token_answers_have_a_speed_by_the_server_report() -> None:
    report = figures(FakeServer(tokens=1), [trace("a")], baseline=True)
    assert (report["turns"], report["decode_tokens_per_s"], report["speed_ratio"]) == (2, 100.0, 4.0)


def test_turns_limit_and_named_model() -> None:
    server = FakeServer()
    replayed = run(server, [trace("a", turns=5)], turns=2, model="other")
    assert len(replayed.trajectories["a"]) == 2
    assert json.loads(server.bodies[0])["model"] == "other"


def test_clients_bound_the_trajectories_at_a_time_and_keep_the_order() -> None:
    server = FakeServer()
    traces = [trace(f"t{at}") for at in range(6)]
    replayed = run(server, traces, clients=3)
    assert server.most_active == 3
    assert list(replayed.trajectories) == [f"t{at}" for at in range(6)]
    assert [turn.index for turn in replayed.trajectories["t5"]] == [2, 4]


def test_progress_counts_every_turn() -> None:
    server = FakeServer()
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    asyncio.run(replay([trace("a")], "http://fake", ReplayOptions(), transport=server.transport, progress=progress))
    assert seen == [(0, 2), (1, 2), (2, 2)]


CONTEXT = {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}


@pytest.mark.parametrize(
    "error", [CONTEXT, {"error": {"message": "This model's maximum context length is 9 tokens", "code": 400}}]
)
def test_turns_that_do_not_fit_are_skipped_and_counted(error: dict[str, Any]) -> None:
    server = FakeServer()
    server.broken = lambda body: httpx.Response(400, json=error) if len(body["messages"]) > 2 else None
    report = figures(server, [trace("a", turns=3)], baseline=True)
    assert (report["turns"], report["skipped"], report["per_trajectory"][0]["skipped"]) == (1, 2, 2)


def test_long_prompts_are_skipped_unsent_on_demand() -> None:
    server = FakeServer()
    long = trace("a", turns=1)
    more = parse_trace(
        {
            "id": "b",
            "source": "s",
            "domain": "d",
            "messages": [{"role": "user", "content": "x" * 4000}, long.messages[-1]],
        }
    )
    report = figures(server, [long, more], max_prompt_tokens=500)
    assert (report["turns"], report["skipped"], len(server.bodies)) == (1, 1, 1)


WHOLE = (delta(content="hi"), FINISH, event({"choices": [], "usage": {"completion_tokens": 1}}), DONE)

FAILURES: list[tuple[httpx.Response, str]] = [
    (streamed(*WHOLE[:1]), "the stream ended without a finish reason"),
    (streamed(*WHOLE[:2]), r"the stream ended without \[DONE\]"),
    (streamed(WHOLE[0], DONE), "the stream ended without a finish reason"),
    (streamed(*WHOLE[:3], DONE[:-1]), r"the stream ended without \[DONE\]"),
    (streamed(WHOLE[0], httpx.ReadError("reset")), "the connection failed before the answer was complete: reset"),
    (streamed(WHOLE[0], event({"error": {"message": "boom"}})), "the server failed: boom"),
    (streamed(WHOLE[0], event({"error": "boom"})), "the server failed: boom"),
    (streamed(b"data: {oops\n\n"), "an event that is not JSON"),
    (streamed(b"data: [1]\n\n"), "an event that is not an object"),
    (streamed(event({"choices": [3]})), "an event of an unknown form"),
    (streamed(event({"choices": [], "agentspec": [1]})), "an event of an unknown form"),
    (streamed(b"data: \xff\n\n"), "not UTF-8"),
    (streamed(WHOLE[0], FINISH, DONE), "reports no usage"),
    (httpx.Response(200, json={"choices": []}), "the server did not stream: content type 'application/json'"),
    (httpx.Response(429, json={"error": {"message": "queue full"}}), "status 429: queue full"),
    (httpx.Response(400, json={"error": {"message": "bad", "code": "x"}}), "status 400: bad"),
    (httpx.Response(502, text="<html>bad gateway"), "status 502: <html>bad gateway"),
]


@pytest.mark.parametrize(("response", "message"), FAILURES, ids=[message for _, message in FAILURES])
def test_api_20_anything_but_a_whole_answer_is_an_error_that_names_the_turn(
    response: httpx.Response, message: str
) -> None:
    server = FakeServer()
    server.broken = lambda body: response if len(body["messages"]) == 4 else None
    with pytest.raises(ReplayError, match=rf"^demo/a, messages\[4\]: .*{message}"):
        run(server, [trace("demo/a")])


def test_failure_stops_the_other_clients() -> None:
    server = FakeServer()
    server.broken = lambda body: streamed() if body["messages"][0]["content"] == "You are t0." else None
    with pytest.raises(ReplayError, match=r"^t0, messages\[2\]"):
        run(server, [trace(f"t{at}", turns=50) for at in range(3)], clients=3)
    assert len(server.bodies) < 20


def test_server_that_is_not_there_is_named() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    transport = httpx.MockTransport(refuse)
    with pytest.raises(ReplayError, match=r"http://fake: cannot be reached: connection refused"):
        asyncio.run(replay([trace("a")], "http://fake", ReplayOptions(), transport=transport))


@pytest.mark.parametrize("listing", [{"data": []}, {}, {"data": None}])
def test_server_without_models_asks_for_a_name(listing: dict[str, Any]) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=listing))
    with pytest.raises(ReplayError, match="lists no model; name one with --model"):
        asyncio.run(replay([trace("a")], "http://fake", ReplayOptions(), transport=transport))


def test_api_key_is_sent_and_not_reported() -> None:
    server = FakeServer()
    report = figures(server, [trace("a", turns=1)], api_key="sesame")
    assert server.headers[0]["authorization"] == "Bearer sesame"
    assert "sesame" not in json.dumps(report)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_url_may_end_with_v1(url: str) -> None:
    assert base_url(url) == "http://h:1"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ReplayError, match="--url must start with http"):
        base_url(url)


def test_socket_closed_in_the_middle_of_an_answer_is_an_error() -> None:
    async def serve_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n" % (len(WHOLE[0]), WHOLE[0]))
        await writer.drain()
        writer.close()

    async def scene() -> None:
        server = await asyncio.start_server(serve_half, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await replay([trace("a")], f"http://127.0.0.1:{port}", ReplayOptions(model="m"))

    with pytest.raises(ReplayError, match="the connection failed before the answer was complete"):
        asyncio.run(scene())
