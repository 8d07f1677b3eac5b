"""Both ends of every link agree on sizes and pings, set in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from helpers.replica import FakeReplica, serving
from specserve.rpc.channel import (
    CLIENT_OPTIONS,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    SERVER_OPTIONS,
    open_channel,
)
from specserve.rpc.codec import MAX_APPEND_TOKENS
from specserve.rpc.v1 import common_pb2, draft_pb2_grpc


def value(options: Sequence[tuple[str, int]], name: str) -> int:
    """Return the one value of an option."""
    (found,) = [number for key, number in options if key == name]
    return found


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_message_limits_are_the_same_on_both_ends_B178_B179(direction: str) -> None:
    """A limit raised on one end alone would still refuse; and it fits a signed 32-bit option."""
    name = f"grpc.max_{direction}_message_length"
    assert value(CLIENT_OPTIONS, name) == value(SERVER_OPTIONS, name) == MAX_MESSAGE_BYTES
    assert 0 < MAX_MESSAGE_BYTES < 2**31
    # A frame is full of calls, or is one call alone: the longest there are leave room.
    assert 4 * MAX_APPEND_TOKENS < MAX_FRAME_BYTES <= MAX_MESSAGE_BYTES // 4


def test_server_allows_the_pings_that_clients_send_B181() -> None:
    """Idle links are kept alive, and never cut for pinging too often."""
    every = value(CLIENT_OPTIONS, "grpc.keepalive_time_ms")
    for name in (
        "grpc.http2.min_ping_interval_without_data_ms",
        "grpc.http2.min_recv_ping_interval_without_data_ms",
    ):
        assert value(SERVER_OPTIONS, name) < every
    assert value(CLIENT_OPTIONS, "grpc.keepalive_permit_without_calls") == 1
    assert value(CLIENT_OPTIONS, "grpc.http2.max_pings_without_data") == 0


async def test_every_link_has_a_connection_of_its_own_B182() -> None:
    """Two channels to one address share no subchannel, so closing one cuts no other."""
    async with serving(FakeReplica()) as address:
        first, second = open_channel(address), open_channel(address)
        stubs = [draft_pb2_grpc.DraftServiceStub(channel) for channel in (first, second)]
        for stub in stubs:
            await stub.GetModel(common_pb2.GetModelRequest())
        await first.close()
        await stubs[1].GetModel(common_pb2.GetModelRequest())
        assert second.get_state() is grpc.ChannelConnectivity.READY
        await second.close()


@pytest.mark.slow
async def test_calls_that_come_at_once_are_all_heard() -> None:
    """gRPC's own limit of pending calls refuses by chance; that is for admission to decide."""
    async with serving(FakeReplica()) as address:
        channel = open_channel(address)
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        calls = [stub.GetModel(common_pb2.GetModelRequest()) for _ in range(3_500)]
        codes = await asyncio.gather(*(call.code() for call in calls))
        await channel.close()
    assert set(codes) == {grpc.StatusCode.OK}
