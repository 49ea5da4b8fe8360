"""A TCP proxy on loopback that delivers what it gets later than it came."""

import asyncio
from types import TracebackType


class SlowProxy:
    """Forwards connections to a port of this machine; `delay_s` may be changed while it runs."""

    def __init__(self, target: int, delay_s: float) -> None:
        self.target = target
        self.delay_s = delay_s
        self.port = 0
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> "SlowProxy":
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.ensure_future(self.forward(source, sink, late=source is reader))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, late: bool) -> None:
        """One direction; only what the client sends is late."""
        try:
            while data := await source.read(1 << 16):
                if late and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()
