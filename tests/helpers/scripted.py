"""A draft that answers what a test writes down for it, reply by reply. See also `double.py`."""

from __future__ import annotations

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
