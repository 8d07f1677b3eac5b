"""Stands between an orchestrator and a replica: loses, repeats, swaps or stalls frames, and cuts.

Speaks gRPC with bytes for messages, so that it serves both replica services; only a frame that it
is to spoil is read. Knows no session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import grpc

from specserve.rpc.channel import SERVER_OPTIONS, open_channel
from specserve.rpc.v1 import draft_pb2, target_pb2

Way = Literal["calls", "replies"]
"""calls: from the orchestrator; replies: back to it."""
Fault = Literal["lose", "lose_and_cut", "duplicate", "reorder"]

SWAP_WAIT_S = 0.2
"""How long a held frame waits for one that may overtake it."""

_FRAMES: dict[tuple[str, Way], Callable[[bytes], Any]] = {
    ("Propose", "calls"): draft_pb2.ProposeFrame.FromString,
    ("Propose", "replies"): draft_pb2.ProposeReplyFrame.FromString,
    ("Verify", "calls"): target_pb2.VerifyFrame.FromString,
    ("Verify", "replies"): target_pb2.VerifyReplyFrame.FromString,
}
_FIELD: dict[Way, str] = {"calls": "calls", "replies": "replies"}


class CutError(Exception):
    """The stream is to end as if its connection had broken."""


class FrameProxy(grpc.GenericRpcHandler):
    """Forwards every call of one replica; spoils frames where it is told to."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = open_channel(address)
        self._due: dict[Way, list[Fault]] = {"calls": [], "replies": []}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._cut = asyncio.Event()
        self.num_spoiled = 0
        """Faults that have hit a frame."""

    def spoil(self, way: Way, fault: Fault) -> None:
        """Let this happen to the next frame that carries calls (or replies)."""
        self._due[way].append(fault)

    def forget_faults(self) -> None:
        """Spoil nothing that was not hit yet."""
        for due in self._due.values():
            due.clear()

    def stall(self) -> None:
        """Pass nothing on, either way, until `flow` or `cut`; new streams wait too."""
        self._flowing.clear()

    def flow(self) -> None:
        """Pass on what has waited, in order."""
        self._flowing.set()

    def cut(self) -> None:
        """End every stream as a broken connection would; later ones pass."""
        cut, self._cut = self._cut, asyncio.Event()
        cut.set()
        self._flowing.set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Forward whatever is asked for."""
        path = handler_call_details.method
        method = path.rpartition("/")[2]
        if method not in ("Propose", "Verify"):

            async def ask(request: bytes, context: Any) -> bytes:
                await self._flowing.wait()
                forward: Any = self._channel.unary_unary(path)
                try:
                    answer: bytes = await forward(request, timeout=10)
                except grpc.aio.AioRpcError as error:
                    await context.abort(error.code(), error.details() or "")
                    raise
                return answer

            return grpc.unary_unary_rpc_method_handler(ask)

        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._forward(path, method, requests, context)

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _forward(
        self, path: str, method: str, requests: AsyncIterator[bytes], context: Any
    ) -> None:
        there: Any = self._channel.stream_stream(path)()
        cut = self._cut

        async def replies() -> AsyncIterator[bytes]:
            while (frame := await there.read()) is not grpc.aio.EOF:
                yield frame

        async def send_on() -> None:
            await self._pump(method, "calls", requests, there.write)
            await there.done_writing()

        tasks = [
            asyncio.create_task(send_on()),
            asyncio.create_task(self._pump(method, "replies", replies(), context.write)),
            asyncio.create_task(cut.wait()),
        ]
        try:
            # Half-closing ends the pump of calls alone: the last replies are still to come.
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            is_cut = cut.is_set() or isinstance(_error_of(tasks[1]), CutError)
            if is_cut or _error_of(tasks[1]) is not None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was cut")
        finally:
            there.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self,
        method: str,
        way: Way,
        frames: AsyncIterator[bytes],
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(64)

        async def fill() -> None:
            try:
                async for frame in frames:
                    await queue.put(frame)
            finally:
                queue.put_nowait(None)

        filling = asyncio.create_task(fill())
        try:
            while (frame := await queue.get()) is not None:
                await self._flowing.wait()
                for out in await self._spoilt(method, way, frame, queue):
                    await write(out)
            await filling
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)

    async def _spoilt(
        self, method: str, way: Way, frame: bytes, queue: asyncio.Queue[bytes | None]
    ) -> list[bytes]:
        """Return what is to be written in a frame's place."""
        due = self._due[way]
        if not due or not getattr(_FRAMES[method, way](frame), _FIELD[way]):
            return [frame]
        fault = due.pop(0)
        self.num_spoiled += 1
        if fault == "lose":
            return []
        if fault == "lose_and_cut":
            self.cut()
            raise CutError
        if fault == "duplicate":
            return [frame, frame]
        try:
            other = await asyncio.wait_for(queue.get(), SWAP_WAIT_S)
        except TimeoutError:
            return [frame]
        if other is None:
            queue.put_nowait(None)
            return [frame]
        return [other, frame]


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


@asynccontextmanager
async def frames_to(address: str) -> AsyncIterator[tuple[FrameProxy, str]]:
    """Stand in front of a replica; gives the proxy and its address."""
    proxy = FrameProxy(address)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((proxy,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield proxy, f"127.0.0.1:{port}"
    finally:
        proxy.cut()
        await server.stop(None)
        await proxy._channel.close()
