"""A client that leaves frees its place at once, in every phase."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from agentspec.config import ServerConfig
from agentspec.server.app import create_app
from agentspec.server.run import serve_in_thread
from agentspec.types import Delta, GenerationRequest
from tests.server.conftest import CHAT, TEXT, ScriptedWorker, ask

HEAD = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "http_version": "1.1"}


async def leave(
    worker: ScriptedWorker, body: dict[str, Any], when: Callable[[list[Message]], bool], path: str = CHAT
) -> list[Message]:
    """Talks to the app itself and disconnects once `when` holds for what was sent so far."""
    sent: list[Message] = []
    received = False

    async def receive() -> Message:
        nonlocal received
        if not received:
            received = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        while not when(sent):
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    app = create_app(worker, ServerConfig(keepalive_s=0.01))
    await asyncio.wait_for(app({**HEAD, "path": path}, receive, send), 5)
    return sent


def test_prx_02_while_the_body_is_sent() -> None:
    worker = ScriptedWorker()
    messages: Iterator[Message] = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )
    sent: list[Message] = []

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(create_app(worker, ServerConfig())(dict(HEAD), receive, send))
    assert (sent, worker.rendered) == ([], [])


@pytest.mark.parametrize("stream", [False, True])
def test_prx_01_and_02_before_the_first_token(stream: bool) -> None:
    worker = ScriptedWorker(delay_s=60)
    asyncio.run(leave(worker, ask(stream=stream), lambda _: worker.running == 1))
    assert (len(worker.requests), worker.running, worker.closed_early) == (1, 0, 1)


def test_prx_02_between_tokens() -> None:
    worker = ScriptedWorker(script=["a"] * 10_000, delay_s=0.001)
    sent = asyncio.run(leave(worker, ask(stream=True), lambda sent: len(sent) > 5))
    assert (worker.running, worker.closed_early) == (0, 1)
    assert len(sent) < 1000
    assert all(message.get("more_body", True) for message in sent)


def test_prx_01_in_the_middle_of_a_whole_answer() -> None:
    worker = ScriptedWorker(script=["a"] * 10_000, delay_s=0.001)
    started = time.monotonic()
    sent = asyncio.run(leave(worker, ask(), lambda _: time.monotonic() - started > 0.05))
    assert (worker.running, worker.closed_early, sent) == (0, 1, [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, ask()), (TEXT, {"prompt": ["a", "b"]})])
def test_leaving_stops_every_choice(path: str, body: dict[str, Any], stream: bool) -> None:
    worker = ScriptedWorker(script=["a"] * 10_000, delay_s=0.001)
    fields = {"n": 3, "max_tokens": 10_000, "stream": stream}
    asked = len(body.get("prompt", [""])) * 3
    asyncio.run(leave(worker, {**body, **fields}, lambda _: worker.running == asked, path))
    assert (len(worker.requests), worker.running, worker.closed_early) == (asked, 0, asked)


class HeldDeltas:
    """An iterator that only its own `aclose` ends, as one that reads from another thread."""

    def __init__(self) -> None:
        self.closed = False

    def __aiter__(self) -> "HeldDeltas":
        return self

    async def __anext__(self) -> Delta:
        await asyncio.sleep(0.001)
        return Delta("a", 1)

    async def aclose(self) -> None:
        self.closed = True


class HoldingWorker(ScriptedWorker):
    """Gives the same iterator to every request."""

    held = HeldDeltas()

    def generate(self, *requests: GenerationRequest) -> AsyncIterator[Delta]:
        return self.held


@pytest.mark.parametrize("stream", [False, True])
def test_prx_05_the_iterator_of_the_worker_is_closed(stream: bool) -> None:
    worker = HoldingWorker()
    worker.held = HeldDeltas()
    started = time.monotonic()
    asyncio.run(leave(worker, ask(stream=stream), lambda _: time.monotonic() - started > 0.02))
    assert worker.held.closed


@pytest.mark.parametrize("stream", [False, True])
def test_prx_04_and_05_on_a_real_socket_then_five_more_requests(stream: bool) -> None:
    worker = ScriptedWorker(delay_s=60)
    with serve_in_thread(worker, ServerConfig(keepalive_s=30)) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + CHAT, json=ask(stream=stream), timeout=0.3)
        deadline = time.monotonic() + 1
        while worker.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (worker.running, worker.closed_early) == (0, 1)
        worker.delay_s = 0
        answers = [httpx.post(url + CHAT, json=ask()).status_code for _ in range(5)]
        metrics = httpx.get(url + "/metrics").text
    assert answers == [200] * 5
    assert 'agentspec_http_requests_total{route="/v1/chat/completions",status="499"} 1.0' in metrics
