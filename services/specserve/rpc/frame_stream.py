"""The server end of one orchestrator's stream: frames come in, and go out once a turn.

Knows frames; knows neither what a reply says nor which call it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from specserve.model.messages import EngineLoad
from specserve.rpc import codec
from specserve.rpc.framing import num_in_frame
from specserve.rpc.v1 import common_pb2


class FrameStream:
    """Replies and notices of one stream, gathered until the writer's next turn."""

    def __init__(self, make_frame: Callable[..., Any]) -> None:
        self._make_frame = make_frame
        self._replies: list[Any] = []
        self._drain_deadline_s: float | None = None
        self._wake = asyncio.Event()

    def push(self, reply: Any) -> None:
        """Put a reply into the next frame."""
        self._replies.append(reply)
        self._wake.set()

    def announce_drain(self, deadline_s: float) -> None:
        """Say in the next frame that the replica stops in so many seconds."""
        self._drain_deadline_s = deadline_s
        self._wake.set()

    def report_load(self) -> None:
        """Write a frame soon, be there replies or not: every frame carries the load."""
        self._wake.set()

    async def run(
        self,
        requests: AsyncIterator[Any],
        context: grpc.aio.ServicerContext[Any, Any],
        *,
        take: Callable[[Any], None],
        load: Callable[[], EngineLoad],
        stopping: asyncio.Event,
    ) -> None:
        """Read and write until the caller ends the stream, it breaks, or the server stops.

        Args:
            requests: the caller's frames, each handed to `take`.
            load: the present load, asked for with every frame that is written.
        """
        tasks = [
            asyncio.create_task(self._read(requests, take)),
            asyncio.create_task(self._write(context, load)),
            asyncio.create_task(stopping.wait()),
        ]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # a broken stream ends with its own error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Any], take: Callable[[Any], None]) -> None:
        async for frame in requests:
            take(frame)

    async def _write(
        self, context: grpc.aio.ServicerContext[Any, Any], load: Callable[[], EngineLoad]
    ) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            count = num_in_frame(self._replies)
            replies, self._replies = self._replies[:count], self._replies[count:]
            if self._replies:
                self._wake.set()
            drain, self._drain_deadline_s = self._drain_deadline_s, None
            notice = None if drain is None else common_pb2.DrainNotice(deadline_s=drain)
            await context.write(
                self._make_frame(replies=replies, load=codec.pack_load(load()), draining=notice)
            )
