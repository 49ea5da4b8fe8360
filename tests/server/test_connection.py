"""Slow, half-closing and hostile clients on real sockets."""

import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from agentspec.config import ServerConfig
from agentspec.server.connection import MAX_HEADER_BYTES
from agentspec.server.run import serve_in_thread
from tests.server.conftest import CHAT, ScriptedWorker, ask

HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: here\r\n".encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        yield client


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes, or resets, the connection."""
    received = b""
    try:
        while piece := client.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def answer(client: socket.socket) -> bytes:
    """One answer that has a length, interim answers before it included."""
    received = b""
    while True:
        head, ended, body = received.rpartition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head[head.rfind(b"HTTP/1.1 ") :])
        if ended and length and len(body) >= int(length[1]):
            return received
        piece = client.recv(65536)
        assert piece, received
        received += piece


def request_of(**fields: Any) -> bytes:
    body = json.dumps(ask(**fields)).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def parsed(received: bytes) -> tuple[int, Any]:
    """Status and JSON of the one final answer, interim ones left out."""
    while received.startswith(b"HTTP/1.1 100 "):
        received = received.partition(b"\r\n\r\n")[2]
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


@pytest.fixture(scope="module")
def hasty() -> Iterator[str]:
    """A server that waits a fifth of a second for a request."""
    with serve_in_thread(ScriptedWorker(), ServerConfig(receive_s=0.2)) as url:
        yield url


@pytest.mark.parametrize(
    "sent",
    [
        b"POST ",
        HEAD,
        HEAD + b"X-Slow: a",
        HEAD + b"Content-Length: 100\r\n\r\n",
        HEAD + b'Content-Length: 100\r\n\r\n{"messages":',
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        HEALTH * 3 + b"GET /he",
    ],
)
def test_what_does_not_arrive_in_time_is_a_408_and_the_end(hasty: str, sent: bytes) -> None:
    with connected(hasty) as client:
        client.sendall(sent)
        received = rest(client)
    status, body = parsed(received[received.rindex(b"HTTP/1.1 ") :])
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    assert "0.2 s" in body["error"]["message"]


def test_a_byte_at_a_time_buys_no_more_time(hasty: str) -> None:
    with connected(hasty) as client:
        client.sendall(HEAD)
        for _ in range(200):
            try:
                client.sendall(b"X")
            except OSError:
                break
            time.sleep(0.02)
        else:
            pytest.fail("the connection was kept")


@pytest.mark.parametrize("sent", [b"", b"POST /nowhere HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\nx"])
def test_connections_that_leave_the_server_waiting_are_closed(hasty: str, sent: bytes) -> None:
    with connected(hasty) as client:
        client.sendall(sent)
        received = rest(client)
    assert received.startswith(b"HTTP/1.1 404 ") if sent else received == b""


def test_time_between_requests_is_not_theirs(hasty: str) -> None:
    with connected(hasty) as client:
        for _ in range(2):
            client.sendall(HEALTH)
            assert answer(client).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.4)
        client.sendall(request_of())
        assert answer(client).startswith(b"HTTP/1.1 200 ")


def test_an_answer_may_take_longer_than_its_request() -> None:
    with serve_in_thread(ScriptedWorker(delay_s=0.2), ServerConfig(receive_s=0.1)) as url:
        assert httpx.post(url + CHAT, json=ask()).status_code == 200


def test_no_limit_waits() -> None:
    with serve_in_thread(ScriptedWorker(), ServerConfig(receive_s=0)) as url, connected(url) as client:
        sent = request_of()
        for start in range(0, len(sent), 40):
            client.sendall(sent[start : start + 40])
            time.sleep(0.05)
        assert answer(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("delay_s", [0.0, 0.4])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_gets_its_answer(stream: bool, delay_s: float) -> None:
    with serve_in_thread(ScriptedWorker(delay_s=delay_s), ServerConfig()) as url, connected(url) as client:
        client.sendall(request_of(stream=stream))
        client.shutdown(socket.SHUT_WR)
        received = rest(client)
    if stream:
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        status, body = parsed(received)
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello world")


def test_requests_in_a_row_are_all_answered_after_the_side_was_closed() -> None:
    with serve_in_thread(ScriptedWorker(delay_s=0.02), ServerConfig()) as url, connected(url) as client:
        client.sendall(request_of() * 3)
        client.shutdown(socket.SHUT_WR)
        received = rest(client)
    assert received.count(b"Hello world") == received.count(b"HTTP/1.1 200 ") == 3


def test_a_client_that_closes_its_side_in_the_middle_of_a_request_gets_nothing() -> None:
    worker = ScriptedWorker()
    with serve_in_thread(worker, ServerConfig()) as url, connected(url) as client:
        client.sendall(request_of()[:-5])
        client.shutdown(socket.SHUT_WR)
        assert rest(client) == b""
    assert worker.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_first_and_then_leaves_frees_its_place(stream: bool) -> None:
    worker = ScriptedWorker(delay_s=60)
    with serve_in_thread(worker, ServerConfig(keepalive_s=30)) as url:
        with connected(url) as client:
            client.sendall(request_of(stream=stream))
            client.shutdown(socket.SHUT_WR)
            assert within(5, lambda: worker.running == 1)
            assert client.recv(65536).startswith(b"HTTP/1.1 100 ")
            time.sleep(0.3)
            assert worker.running == 1
        assert within(5, lambda: worker.running == 0)
    assert worker.closed_early == 1


def test_an_old_client_that_closes_its_side_has_left() -> None:
    worker = ScriptedWorker(delay_s=60)
    with serve_in_thread(worker, ServerConfig()) as url, connected(url) as client:
        client.sendall(request_of().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert within(5, lambda: worker.running == 1)
        client.shutdown(socket.SHUT_WR)
        assert rest(client) == b""
        assert within(5, lambda: worker.running == 0)


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"messages":[{"role":"user","content":"x"}]}'


def health(url: str) -> int:
    with connected(url) as client:
        client.sendall(HEALTH)
        return parsed(answer(client))[0]


HOSTILE: dict[str, tuple[bytes, int]] = {
    "a huge header": (HEAD + b"X: " + b"a" * (MAX_HEADER_BYTES + 9000) + b"\r\n\r\n", 431),
    "a huge target": (b"GET /" + b"a" * (MAX_HEADER_BYTES + 9000) + b" HTTP/1.1\r\nHost: h\r\n\r\n", 431),
    "many headers": (HEAD + b"".join(b"X-%d: a\r\n" % at for at in range(9000)) + b"\r\n", 431),
    "no request": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "another protocol": (b"GET /health SIP/2.0\r\n\r\n", 400),
    "a header without a colon": (HEAD + b"nonsense\r\n\r\n", 400),
    "a space before the colon": (HEAD + b"Content-Length : 3\r\n\r\n{}", 400),
    "a NUL in a header": (HEAD + b"X: a\x00b\r\n\r\n", 400),
    "a folded line at the start": (b"GET /health HTTP/1.1\r\n a: b\r\nHost: h\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 44\r\nContent-Length: 4\r\n\r\n" + BODY, 400),
    "two lengths in one line": (HEAD + b"Content-Length: 44, 4\r\n\r\n" + BODY, 400),
    "a negative length": (HEAD + b"Content-Length: -1\r\n\r\n" + BODY, 400),
    "a length with a sign": (HEAD + b"Content-Length: +44\r\n\r\n" + BODY, 400),
    "a length in hex": (HEAD + b"Content-Length: 0x2c\r\n\r\n" + BODY, 400),
    "a length of many digits": (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "a chunk size that is none": (CHUNKED + b"xyz\r\n{}\r\n0\r\n\r\n", 400),
    "a negative chunk size": (CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n", 400),
    "a chunk size without end": (CHUNKED + b"f" * 100 + b"\r\n{}", 400),
    "a chunk longer than its size": (CHUNKED + b"1\r\n{}\r\n0\r\n\r\n", 400),
    "an unknown coding": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
    "a length beside chunks": (CHUNKED[:-2] + b"Content-Length: 3\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
    "an id that is no ASCII": (HEAD + b"X-AgentSpec-Trajectory: \xff\xfe\r\nContent-Length: 44\r\n\r\n" + BODY, 400),
    "two different ids": (
        HEAD + b"X-AgentSpec-Trajectory: a\r\nX-AgentSpec-Trajectory: b\r\nContent-Length: 44\r\n\r\n" + BODY, 200,
    ),
    "the same length twice": (HEAD + b"Content-Length: 44\r\nContent-Length: 44\r\n\r\n" + BODY, 200),
    "a tunnel": (b"CONNECT here:443 HTTP/1.1\r\nHost: here\r\n\r\n", 404),
    "an upgrade": (HEALTH[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    "a method nobody knows": (b"BREW /health HTTP/1.1\r\nHost: here\r\n\r\n", 405),
    "escapes in a path": (b"GET /v1/models/%00%0d%0a%ff%ed%a0%80 HTTP/1.1\r\nHost: here\r\n\r\n", 404),
    "an announced body of exabytes": (HEAD + b"Content-Length: 9999999999999999999\r\n\r\n" + b" " * 999, 408),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_http_gets_its_envelope_and_the_next_client_its_answer(
    hasty: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent, status = HOSTILE[name]
    with connected(hasty) as client:
        client.sendall(sent)
        received = answer(client)
    assert health(hasty) == 200
    found, body = parsed(received)
    assert found == status
    if status != 200:
        assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert [entry for entry in caplog.records if entry.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("more", [b"xyz\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 70_000])
def test_nonsense_after_an_early_answer_is_no_fault_of_ours(more: bytes, caplog: pytest.LogCaptureFixture) -> None:
    early = b"POST /nowhere HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serve_in_thread(ScriptedWorker(), ServerConfig(receive_s=5)) as url, connected(url) as client:
        client.sendall(early)
        assert answer(client).startswith(b"HTTP/1.1 404 ")
        client.sendall(more)
        assert rest(client) == b""
    assert [entry for entry in caplog.records if entry.levelno >= logging.ERROR] == []
