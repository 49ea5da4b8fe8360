"""The server on a socket."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from agentspec.config import ServerConfig
from agentspec.errors import ConfigError
from agentspec.server.run import base_url, listen, serve, serve_in_thread
from tests.server.conftest import CHAT, ScriptedWorker, ask, events


def test_a_free_port_and_a_stream_over_it() -> None:
    with serve_in_thread(ScriptedWorker(), ServerConfig(port=1)) as url:
        assert httpx.get(url + "/health").json() == {"status": "ok"}
        assert len(events(httpx.post(url + CHAT, json=ask(stream=True)))) == 4
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")


def test_a_taken_port_is_named() -> None:
    with listen(ServerConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"AGENTSPEC_SERVER_PORT: port {port} on 127.0.0.1 is in use"):
            serve(ScriptedWorker(), ServerConfig(port=port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "a b", "a" * 70, "a..b"])
def test_a_wrong_host_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"AGENTSPEC_SERVER_HOST.*{host}"):
        listen(ServerConfig(host=host, port=0))


def test_a_wrong_port_is_named() -> None:
    with pytest.raises(ConfigError, match="AGENTSPEC_SERVER_PORT must be 0 to 65535, got 70000"):
        listen(ServerConfig(port=70_000))


def test_base_url_can_be_used_from_here() -> None:
    with listen(ServerConfig(host="0.0.0.0", port=0)) as listener:
        assert base_url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_sender_of_nine_megabytes_that_reads_late_gets_its_answer() -> None:
    with serve_in_thread(ScriptedWorker(), ServerConfig()) as url:
        client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        for body in (b" " * 9_000_000, iter([b" " * 1_000_000] * 9)):
            client.request("POST", CHAT, body)
            response = client.getresponse()
            assert json.loads(response.read())["error"]["code"] == "body_too_large"
            assert response.status == 413
        client.request("POST", CHAT, json.dumps(ask()))
        assert client.getresponse().status == 200
        client.close()


def test_a_stream_over_the_time_at_shutdown_ends_with_an_error_event() -> None:
    worker = ScriptedWorker(script=["a"] * 1000, delay_s=0.05)
    with serve_in_thread(worker, ServerConfig(shutdown_s=0)) as url:
        stream = httpx.stream("POST", url + CHAT, json=ask(stream=True))
        response = stream.__enter__()
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
    rest = [line for line in lines if line]
    stream.__exit__(None, None, None)
    assert rest[-1].startswith('data: {"error":{"message":"the server is stopping"')
    assert worker.running == 0
    assert worker.ended


SCRIPT = """
from agentspec.config import ServerConfig
from agentspec.server.run import serve
from tests.server.conftest import ScriptedWorker
serve(ScriptedWorker(script=["a"] * 10, delay_s=0.05), ServerConfig(port=0), ready=lambda url: print(url, flush=True))
print("ended", flush=True)
"""


@contextmanager
def server_process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_stream_end_and_serve_return(number: signal.Signals) -> None:
    with server_process() as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.stream("POST", url + CHAT, json=ask(stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(process.pid, number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.stdout.read() == "ended\n"
        assert process.wait(5) == 0


def test_the_server_side_needs_no_model_library() -> None:
    code = "import sys, agentspec.server.run; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def test_localhost_is_the_address_that_clients_try() -> None:
    with listen(ServerConfig(host="localhost", port=0)) as listener:
        assert base_url(listener).startswith("http://127.0.0.1:")


def test_many_clients_that_come_and_go_leave_nothing_running() -> None:
    worker = ScriptedWorker(script=["a"] * 50, delay_s=0.002)

    async def one(client: httpx.AsyncClient, index: int) -> str:
        async with client.stream("POST", CHAT, json=ask(stream=index % 3 > 0)) as response:
            pieces = response.aiter_text()
            if index % 2:
                return await anext(pieces)
            return "".join([piece async for piece in pieces])

    async def many(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            return await asyncio.gather(*(one(client, index) for index in range(40)))

    with serve_in_thread(worker, ServerConfig()) as url:
        answers = asyncio.run(many(url))
        deadline = time.monotonic() + 1
        while worker.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert worker.running == 0
    assert all(text.endswith("data: [DONE]\n\n") for text in answers[2::6] + answers[4::6])
    assert worker.closed_early > 0


def test_serving_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with serve_in_thread(ScriptedWorker(), ServerConfig()) as url:
        host, port = url.removeprefix("http://").split(":")
        socket.create_connection((host, int(port))).close()
    assert threading.active_count() == before


ALONGSIDE = """
import asyncio
import httpx
from agentspec.config import ServerConfig
from agentspec.server.run import serve
from tests.server.conftest import CHAT, ScriptedWorker, ask

worker = ScriptedWorker(script=["a"] * 1000, delay_s=0.05)

async def beside(url):
    async with httpx.AsyncClient() as client, client.stream("POST", url + CHAT, json=ask(stream=True)) as response:
        async for _ in response.aiter_text():
            print(url, flush=True)

serve(worker, ServerConfig(port=0, shutdown_s=3600), alongside=beside)
print("ended", worker.running, worker.closed_early, flush=True)
"""


def test_what_runs_beside_the_requests_is_cancelled_at_the_end_with_its_own_request() -> None:
    with subprocess.Popen([sys.executable, "-c", ALONGSIDE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http://127.0.0.1:")
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout.read().splitlines()[-1] == "ended 0 1"
            assert process.wait(5) == 0
        finally:
            process.kill()
