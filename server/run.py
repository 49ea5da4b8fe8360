"""Runs the application on a socket, in the foreground or in a thread."""

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace

import uvicorn

from agentspec.config import ServerConfig
from agentspec.errors import ConfigError, Unavailable
from agentspec.server.app import create_app
from agentspec.server.connection import Settings
from agentspec.types import Worker

START_S = 30
BACKLOG = 512

Alongside = Callable[[str], Coroutine[None, None, None]]
"""Given the base URL, what is to run on the server's loop beside the requests."""


class AppServer(uvicorn.Server):
    """A server that says when it listens, runs something beside, and, once stopped by a signal, returns."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], alongside: Alongside | None) -> None:
        super().__init__(config)
        self._ready = ready
        self._alongside = alongside
        self._task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()
        if self._alongside is not None and sockets:
            self._task = asyncio.create_task(self._alongside(base_url(sockets[0])))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Unlike the original, does not raise the signals again after an orderly end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    worker: Worker,
    config: ServerConfig,
    *,
    ready: Callable[[str], None] | None = None,
    alongside: Alongside | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests end for at most `config.shutdown_s` seconds.

    `ready` is called with the base URL once requests are accepted; then `alongside` starts, and is cancelled at the
    end if it still runs. Raises `ConfigError` when the host or port of `config` cannot be listened on.
    """
    listener = listen(config)
    url = base_url(listener)
    with listener:
        app_server(worker, config, lambda: ready(url) if ready else None, alongside).run(sockets=[listener])


@contextlib.contextmanager
def serve_in_thread(worker: Worker, config: ServerConfig) -> Generator[str]:
    """Serves in a background thread on a free port; gives the base URL, and stops the server on leaving."""
    listener = listen(replace(config, port=0))
    started = threading.Event()
    server = app_server(worker, config, started.set)
    thread = threading.Thread(target=server.run, args=([listener],), name="agentspec-server", daemon=True)
    with listener:
        thread.start()
        try:
            if not started.wait(START_S):
                raise Unavailable("the server did not start")
            yield base_url(listener)
        finally:
            server.should_exit = True
            thread.join()


def app_server(
    worker: Worker, config: ServerConfig, ready: Callable[[], None], alongside: Alongside | None = None
) -> AppServer:
    return AppServer(Settings(create_app(worker, config), config), ready, alongside)


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket; raises `ConfigError` that names the setting at fault."""
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"AGENTSPEC_SERVER_PORT must be 0 to 65535, got {config.port}")
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise listen_error(config, error) from None
    except ValueError:
        raise ConfigError(f"AGENTSPEC_SERVER_HOST: {config.host!r:.100} is not a host name") from None


def listen_error(config: ServerConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"AGENTSPEC_SERVER_PORT: port {config.port} on {config.host} is in use; stop its user or choose another"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"AGENTSPEC_SERVER_PORT: no permission to listen on port {config.port}")
    return ConfigError(f"AGENTSPEC_SERVER_HOST: cannot listen on {config.host!r}: {error.strerror}")


def base_url(listener: socket.socket) -> str:
    """The URL under which this machine reaches the socket."""
    bound, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, str(bound))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
