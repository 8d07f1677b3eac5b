"""A draft replica whose every word the test chooses, behind a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from specserve.rpc import codec
from specserve.rpc.channel import SERVER_OPTIONS
from specserve.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc


class FakeReplica(draft_pb2_grpc.DraftServiceServicer):
    """Notes the frames that come; says what the test tells it to."""

    def __init__(self) -> None:
        self.replica_id = "one"
        self.protocol_version = codec.PROTOCOL_VERSION
        self.draining = False
        self.frames: list[draft_pb2.ProposeFrame] = []
        self.num_streams = 0
        self.num_open = 0
        self._contexts: list[Any] = []
        self._ends: list[asyncio.Event] = []

    async def GetModel(self, request: Any, context: Any) -> common_pb2.GetModelResponse:
        return common_pb2.GetModelResponse(
            protocol_version=self.protocol_version,
            replica_id=self.replica_id,
            draining=self.draining,
        )

    async def Propose(self, request_iterator: Any, context: Any) -> None:
        self.num_streams += 1
        self.num_open += 1
        end = asyncio.Event()
        self._contexts.append(context)
        self._ends.append(end)
        tasks = [asyncio.create_task(self._read(request_iterator)), asyncio.create_task(end.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_open -= 1
            self._contexts.remove(context)
            self._ends.remove(end)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, request_iterator: Any) -> None:
        async for frame in request_iterator:
            self.frames.append(frame)

    @property
    def calls(self) -> list[common_pb2.SessionCall]:
        """Every call that came, over all frames."""
        return [call.session for frame in self.frames for call in frame.calls]

    @property
    def heartbeats(self) -> list[set[str]]:
        """The sessions of every heartbeat that came."""
        return [
            set(frame.heartbeat.session_ids) for frame in self.frames if frame.HasField("heartbeat")
        ]

    async def say(self, **fields: Any) -> None:
        """Write a frame on every open stream."""
        for context in self._contexts:
            await context.write(draft_pb2.ProposeReplyFrame(**fields))

    async def reply(self, *call_ids: int, num_iterations: int = 1) -> None:
        """Answer calls."""
        await self.say(
            replies=[draft_pb2.ProposeReply(call_id=call_id) for call_id in call_ids],
            load=common_pb2.Load(num_iterations=num_iterations),
        )

    def end_streams(self) -> None:
        """End every open stream from this side."""
        for end in self._ends:
            end.set()


@asynccontextmanager
async def serving(replica: FakeReplica, port: int = 0) -> AsyncIterator[str]:
    """Serve a fake replica; gives its address."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(replica, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        replica.end_streams()
        await server.stop(None)
