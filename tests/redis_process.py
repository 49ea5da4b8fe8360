"""Real redis-servers that a test starts, stops, pauses and restarts, one or three that make a cluster."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from redis import Redis


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One redis-server on one port, with nothing kept on disk; `options` go on its command line."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers."""
        self.process = subprocess.Popen(
            [
                "redis-server",
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
                *self.options,
            ],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
        )
        for _ in range(500):
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    probe.sendall(b"PING\r\n")
                    if probe.recv(16).startswith((b"+PONG", b"-NOAUTH")):
                        return
            except OSError:
                time.sleep(0.01)
        raise RuntimeError("redis-server did not start")

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """It still accepts connections, and never answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It answers again."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


def needs_redis() -> None:
    """Skip the test where there is no redis-server."""
    if shutil.which("redis-server") is None and "REQUIRE_REDIS" not in os.environ:
        pytest.skip("needs redis-server; on Debian: apt-get install redis-server")


@contextmanager
def running(*options: str) -> Iterator[Server]:
    """A started server, gone afterwards."""
    needs_redis()
    with TemporaryDirectory() as folder:
        server = Server(Path(folder), *options)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture
def redis_server() -> Iterator[Server]:
    """A started server, gone afterwards."""
    with running() as server:
        yield server


@contextmanager
def cluster() -> Iterator[list[Server]]:
    """Three started servers that make a cluster, gone afterwards."""
    with ExitStack() as stack:
        buses = [free_port() for _ in range(3)]
        options = (
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "3000",
            "--cluster-require-full-coverage",
            "no",
        )
        servers = [stack.enter_context(running(*options, "--cluster-port", str(bus))) for bus in buses]
        clients: list[Any] = [stack.enter_context(Redis(port=server.port)) for server in servers]
        for number, client in enumerate(clients):
            first, last = 16384 * number // 3, 16384 * (number + 1) // 3 - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server, bus in zip(servers[1:], buses[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        deadline = time.monotonic() + 30
        while not all(complete(client) for client in clients):
            assert time.monotonic() < deadline, "the cluster did not form"
            time.sleep(0.02)
        yield servers


def complete(client: Any) -> bool:
    """Whether a node takes commands and knows of all slots."""
    told = client.execute_command("CLUSTER", "INFO")
    lines = told.decode().split() if isinstance(told, bytes) else [f"{key}:{value}" for key, value in told.items()]
    return {"cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:3"} <= set(lines)
