"""Bytes that are no message end their own call, in plain words, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from helpers.pair import (
    TARGET,
    Generated,
    greedy_tokens,
    make_request,
    running_pair,
)
from helpers.waiting import eventually
from specserve.errors import PeerUnavailable
from specserve.orchestrator.pool import DRAFT_KIND, DraftLink
from specserve.rpc import codec
from specserve.rpc.link import FrameLink
from specserve.rpc.status import ERROR_KEY
from specserve.rpc.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2

GARBLED = [
    pytest.param(b"\xff" * 30, id="no field"),
    pytest.param(b"\x0a\x7f\x01", id="cut short"),
    pytest.param(b"\x07", id="no wire type"),
]
FILES = (draft_pb2, target_pb2, generation_pb2, health_pb2, reflection_pb2)
# Health's List answers UNIMPLEMENTED whatever is asked.
METHODS = [
    method
    for module in FILES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.full_name != "grpc.health.v1.Health.List"
]


def call_with(channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes) -> Any:
    """Call a method with these bytes for a request."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if not method.client_streaming:
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        return make(path)(data)

    async def requests() -> AsyncIterator[bytes]:
        yield data

    return channel.stream_stream(path)(requests())


@pytest.mark.slow
@pytest.mark.parametrize("data", GARBLED)
async def test_garbled_request_is_invalid_argument_in_one_line(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every method of every service: the status names the type that was due, the log has one
    line for each and no trace, and a stream that ran meanwhile loses no token."""
    caplog.set_level(logging.WARNING)
    async with running_pair(TARGET + ",step_ms=2") as pair:
        assert pair.draft is not None
        addresses = {"DraftService": pair.draft.address, "TargetService": pair.target.address}
        answer, stream = Generated(), pair.blocks(make_request(max_tokens=120))
        await pair.take(stream, answer, 5)
        for method in METHODS:
            service = method.containing_service.name
            address = addresses.get(service, pair.orchestrator.address)
            caplog.clear()
            async with grpc.aio.insecure_channel(address) as channel:
                call = call_with(channel, method, data)
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, method.full_name
                assert method.input_type.full_name in await call.details()
                assert (ERROR_KEY, "InvalidRequest") in tuple(await call.trailing_metadata())
            (record,) = caplog.records
            assert record.exc_info is None
            assert method.name in record.getMessage()
            assert f"{len(data)} bytes" in record.getMessage()
        await pair.finish(stream, answer)
        assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), 120)
        assert answer.record is not None
        assert answer.record.num_target_reopens == 0
        await pair.until_idle()


async def test_unknown_method_stays_unimplemented() -> None:
    """What no service has is not mistaken for a request that cannot be read."""
    async with (
        running_pair() as pair,
        grpc.aio.insecure_channel(pair.target.address) as channel,
    ):
        call = channel.unary_unary("/specserve.rpc.v1.TargetService/Nothing")(b"\xff")
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


class GarblingDraft:
    """A draft that answers garbage as long as the test wants, on raw bytes."""

    def __init__(self) -> None:
        self.garbles = ""
        self.num_streams = 0
        self.frames = asyncio.Queue[bytes]()

    async def get_model(self, request: bytes, context: Any) -> bytes:
        if self.garbles == "GetModel":
            return b"\xff" * 7
        model = common_pb2.GetModelResponse(
            protocol_version=codec.PROTOCOL_VERSION, replica_id="one"
        )
        return model.SerializeToString()

    async def propose(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.num_streams += 1
        async for data in requests:
            frame = draft_pb2.ProposeFrame.FromString(data)
            for call in frame.calls:
                if self.garbles == "Propose":
                    yield b"\xff" * 7
                    return
                reply = draft_pb2.ProposeReply(call_id=call.session.call_id)
                yield draft_pb2.ProposeReplyFrame(replies=[reply]).SerializeToString()


@asynccontextmanager
async def serving(draft: GarblingDraft) -> AsyncIterator[str]:
    server = grpc.aio.server()
    handlers = {
        "GetModel": grpc.unary_unary_rpc_method_handler(draft.get_model),
        "Propose": grpc.stream_stream_rpc_method_handler(draft.propose),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("specserve.rpc.v1.DraftService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize("garbles", ["GetModel", "Propose"])
async def test_garbled_response_costs_a_reconnect(
    garbles: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A link that was answered garbage says so in a line, comes back, and its calls go on."""
    caplog.set_level(logging.WARNING)
    draft = GarblingDraft()
    async with serving(draft) as address:
        draft.garbles = garbles
        link: DraftLink = FrameLink(DRAFT_KIND, address, heartbeat_s=30, hang_s=30)
        link.start()
        try:
            call_id = link.next_call_id()
            session = common_pb2.SessionCall(call_id=call_id, session_id="s")
            pending = link.send(draft_pb2.ProposeCall(session=session), call_id)
            await eventually(lambda: caplog.records, "it was said")
            draft.garbles = ""
            try:
                assert (await pending.next(10.0)).call_id == call_id
            except PeerUnavailable:
                # A link that never was connected keeps no call waiting.
                assert garbles == "GetModel"
            await eventually(lambda: link.connected, "it is back")
        finally:
            await link.close()
    for record in caplog.records:
        assert record.exc_info is None
        assert f"{address}: a response of 7 bytes" in record.getMessage()
