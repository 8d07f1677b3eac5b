"""Messages that are no messages: bytes that cannot be read as the type that was due.

gRPC meets a deserializer that raises with a stack trace per message, and with UNKNOWN on a server
or None on a client. So ours never raise: they give `Garbled`, and whoever takes the message next
says so in plain words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specserve.errors import PeerUnavailable

Deserializer = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Garbled:
    """Stands where a message was due."""

    num_bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes that cannot be read: {self.reason}"


def tolerant(deserializer: Deserializer) -> Deserializer:
    """Make a deserializer that gives Garbled where the given one raises DecodeError."""

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return Garbled(len(data), str(error))

    return read


class TolerantChannel:
    """A channel, as far as a generated stub needs it, whose garbled responses come as Garbled."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, *, response_deserializer: Deserializer, **more: Any) -> Any:
        """Make a callable of one request and one response."""
        read = tolerant(response_deserializer)
        return self._channel.unary_unary(method, response_deserializer=read, **more)

    def stream_stream(
        self, method: str, *, response_deserializer: Deserializer, **more: Any
    ) -> Any:
        """Make a callable of many requests and many responses."""
        read = tolerant(response_deserializer)
        return self._channel.stream_stream(method, response_deserializer=read, **more)


def require_readable(response: Any, pool: str, who: str) -> None:
    """Refuse a garbled response.

    Args:
        who: the replica, by its id or address.

    Raises:
        PeerUnavailable: it is garbled; what else the peer says is not to be trusted either.
    """
    if isinstance(response, Garbled):
        raise PeerUnavailable(pool, f"{who}: a response of {response}")
