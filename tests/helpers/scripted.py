"""A draft that answers what a test tells it to, and a TCP proxy that loses what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np

from specserve.rpc import codec
from specserve.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc

Script = Callable[[draft_pb2.ProposeCall, int], draft_pb2.ProposeReply | None]
"""(call, its number from 0) -> what to answer; None stays silent."""


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Speaks the draft's contract and holds nothing."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.max_num_speculative_tokens = 0
        """0 says nothing of a limit."""
        self.calls: list[draft_pb2.ProposeCall] = []
        self.cancels: list[int] = []
        self.releases: list[str] = []

    async def GetModel(self, request: Any, context: Any) -> common_pb2.GetModelResponse:
        return common_pb2.GetModelResponse(
            protocol_version=codec.PROTOCOL_VERSION,
            model_id="scripted",
            replica_id="scripted",
            max_num_speculative_tokens=self.max_num_speculative_tokens,
        )

    async def Propose(self, request_iterator: Any, context: Any) -> None:
        async for frame in request_iterator:
            self.cancels += [cancel.call_id for cancel in frame.cancels]
            self.releases += [release.session_id for release in frame.releases]
            replies = []
            for call in frame.calls:
                reply = self._script(call, len(self.calls))
                self.calls.append(call)
                if reply is not None:
                    replies.append(complete(reply, call))
            if replies:
                await context.write(draft_pb2.ProposeReplyFrame(replies=replies))


def complete(reply: draft_pb2.ProposeReply, call: draft_pb2.ProposeCall) -> draft_pb2.ProposeReply:
    """Fill in what an honest draft would say about its cache, where the script left it out."""
    session = call.session
    reply.call_id, reply.session_id, reply.step = session.call_id, session.session_id, session.step
    if reply.cached_length == 0:
        reply.cached_length = session.keep_length + len(session.append_token_ids) // 4
    return reply


def proposal(
    token_ids: list[int], support: list[list[int]] | None = None, weight: float = 1.0
) -> draft_pb2.ProposeReply:
    """Make a reply of these tokens; `support` gives the ids of each row of q, equally likely."""
    reply = draft_pb2.ProposeReply(draft_token_ids=codec.pack_ids(token_ids))
    if support is not None:
        reply.support_size = len(support[0])
        reply.support_token_ids = np.array(support, "<i4").tobytes()
        reply.support_weights = np.full((len(support), len(support[0])), weight, "<f4").tobytes()
    return reply


@asynccontextmanager
async def scripted_draft(script: Script) -> AsyncIterator[tuple[ScriptedDraft, str]]:
    """Serve a scripted draft; gives it and its address."""
    servicer = ScriptedDraft(script)
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


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
