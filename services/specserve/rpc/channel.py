"""Options that both ends of every gRPC link share. Set here and nowhere else."""

from __future__ import annotations

from typing import Any

import grpc

from specserve.rpc.tls import MutualTls

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either end takes: a token table of a million ids fits with room to spare."""

MAX_FRAME_ITEMS = 64
"""Calls or replies in one frame."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Their bytes in one frame, unless a single one has more: what an opening allows and a grammar can
be a megabyte, and 64 of them would make a message that the peer refuses, and the stream ends."""

MAX_PENDING_CALLS = 1 << 20
"""Calls that have come and that a server's event loop has not looked at yet."""

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Without this a client stops pinging after two pings without data and idle links die unseen.
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    # A replica that comes back should be found in well under the lease.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # So long an attempt may take, handshake and first frame included: of 100 ms a busy machine
    # needs more, every attempt begins anew, and sessions are opened elsewhere that need not be.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    # One connection per channel: two links of a process never share a flow-control window.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS = [
    *_COMMON,
    # Servers must allow the pings that clients send, or they cut idle links ("too_many_pings").
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Whom to refuse is for the orchestrator's admission to say: of more than 1,000 calls that come
    # at once gRPC would cancel some by chance, which reads like a lost server.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # Two processes must not share a port by accident.
    ("grpc.so_reuseport", 0),
]


def open_channel(address: str, tls: MutualTls | None = None) -> grpc.aio.Channel:
    """Open a channel to host:port. One per event loop: grpc.aio objects never cross loops.

    Args:
        tls: None speaks clear text.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return tls.channel(address, CLIENT_OPTIONS)
