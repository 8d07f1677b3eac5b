"""A TCP proxy that outlives the server behind it, and can hold everything back.

Knows bytes; knows no frame.
"""

from __future__ import annotations

import asyncio

from helpers.proxy import Proxy


class LineProxy(Proxy):
    """A proxy of bytes that outlives the server behind it, and can hold everything back."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await super()._serve(reader, writer)
        except OSError:
            writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        gated = _GatedReader(reader, self._flowing)
        await super()._pump(gated, writer, replies=replies)  # type: ignore[arg-type]

    def stall(self) -> None:
        """Pass nothing on until `flow`."""
        self._flowing.clear()

    def flow(self) -> None:
        """Pass on what has waited."""
        self._flowing.set()


class _GatedReader:
    """A stream reader whose data waits while the gate is shut."""

    def __init__(self, reader: asyncio.StreamReader, gate: asyncio.Event) -> None:
        self._reader, self._gate = reader, gate

    async def read(self, size: int) -> bytes:
        data = await self._reader.read(size)
        await self._gate.wait()
        return data
