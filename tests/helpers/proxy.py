"""A TCP proxy between two services that loses what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Proxy:
    """Forwards TCP to a server; can lose replies and cut every connection."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self.lose_replies = False
        self.num_lost = 0
        """Pieces of replies that were thrown away."""

    async def start(self) -> str:
        """Listen; returns host:port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, there_writer]
        self._tasks += [
            asyncio.create_task(self._pump(reader, there_writer, replies=False)),
            asyncio.create_task(self._pump(there_reader, writer, replies=True)),
        ]

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        try:
            while data := await reader.read(65536):
                if replies and self.lose_replies:
                    self.num_lost += 1
                    continue
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        """Abort every connection; new ones are forwarded, replies and all."""
        self.lose_replies = False
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    async def close(self) -> None:
        """Stop listening and drop what is left."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxy_to(address: str) -> AsyncIterator[tuple[Proxy, str]]:
    """Stand between the orchestrator and a service; gives the proxy and its address."""
    host, _, port = address.rpartition(":")
    proxy = Proxy(host, int(port))
    listening = await proxy.start()
    try:
        yield proxy, listening
    finally:
        await proxy.close()
