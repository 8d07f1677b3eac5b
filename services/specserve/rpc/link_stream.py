"""The client end of one stream of frames, both ways at once, until either side ends it.

Knows frames and when to write; knows no call. `link.py` opens one stream after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc


async def run_stream(
    stream: Any,
    *,
    next_frame: Callable[[], Awaitable[Any]],
    take: Callable[[Any], None],
    is_over: Callable[[], bool],
    beside: Coroutine[Any, Any, None],
) -> None:
    """Write and read frames until the stream ends.

    Cancelling cancels the stream.

    Args:
        stream: an open gRPC call.
        next_frame: waits for what is to be written next.
        take: is given each frame that comes.
        is_over: asked after each write; True ends our half of the stream.
        beside: runs as long as the stream does.

    Raises:
        AioRpcError: the status that ended the stream was not OK.
    """
    tasks = [
        asyncio.create_task(_write(stream, next_frame, is_over)),
        asyncio.create_task(beside),
    ]
    try:
        while (frame := await stream.read()) is not grpc.aio.EOF:
            take(frame)
        await stream.code()
    finally:
        # An abandoned aio call is never collected: cancel it by name.
        stream.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _write(
    stream: Any, next_frame: Callable[[], Awaitable[Any]], is_over: Callable[[], bool]
) -> None:
    while True:
        await stream.write(await next_frame())
        if is_over():
            await stream.done_writing()
            return
