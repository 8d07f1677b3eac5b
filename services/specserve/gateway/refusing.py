"""What the HTTP parser refuses by itself, answered in OpenAI's shape.

What is no HTTP never reaches the application: uvicorn's parsers answer it, in plain text if left
alone. Knows uvicorn's parsers; knows no route.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import h11
from uvicorn.protocols.http import h11_impl

from specserve.gateway.errors import HttpError

MAX_HEADER_BYTES = 65_536
"""Most bytes of a request's line and headers that are kept while their end has not come."""

HEADER_TIMEOUT_S = 10.0
"""Longest that a connection may take for a request's line and headers, in seconds."""

LINGER_S = 1.0
"""How long a refused client may go on sending before its connection is closed, in seconds. Closed
at once, with bytes unread, it would be reset, and the client would never see the answer."""

NO_HTTP = HttpError(400, "invalid_request_error", "this is no valid HTTP/1.1 request")
HEADERS_TOO_LARGE = HttpError(
    431,
    "invalid_request_error",
    f"the headers are larger than {MAX_HEADER_BYTES} bytes, the most this server reads",
)

HEADERS_TOO_SLOW = HttpError(
    408,
    "invalid_request_error",
    f"the headers did not come within {HEADER_TIMEOUT_S:g} seconds, the longest this server waits",
)

_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def parser_class() -> type[asyncio.Protocol]:
    """Return the parser that uvicorn would choose by itself: the fast one where it is installed."""
    if find_spec("httptools") is None:
        return RefusingH11
    from specserve.gateway.refusing_httptools import RefusingHttpTools  # noqa: PLC0415 - optional

    return RefusingHttpTools


class Cycle(Protocol):
    """A request and its answer, as both parsers keep them."""

    response_started: bool
    response_complete: bool
    disconnected: bool
    message_event: asyncio.Event


def refuse(transport: asyncio.Transport, cycle: Cycle | None, error: HttpError) -> None:
    """Send the refusal and end the connection, once the client has had time to read it.

    Args:
        cycle: the request read last; it may still be answered, or wait for the rest of its body.
    """
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
        if cycle.response_started:
            # Nothing can be put into the middle of an answer.
            transport.close()
            return
    body = error.to_json()
    head = (
        f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    transport.write(head.encode() + body)
    transport.write_eof()
    asyncio.get_running_loop().call_later(LINGER_S, transport.close)


class HeaderDeadline:
    """Calls once if headers are waited for too long: a connection costs its client nothing."""

    def __init__(self, on_late: Callable[[], None]) -> None:
        self._on_late = on_late
        self._timer: asyncio.TimerHandle | None = None

    def set(self, is_waiting: bool) -> None:
        """Say whether headers are waited for; saying so again does not begin anew."""
        if not is_waiting:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(HEADER_TIMEOUT_S, self._on_late)


class RefusingH11(h11_impl.H11Protocol):
    """The parser in Python, which every installation has."""

    _is_refused = False
    _has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._deadline = HeaderDeadline(self._on_late)
        self._deadline.set(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._deadline.set(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless this connection was refused."""
        if self._is_refused:
            return
        self._has_begun = True
        super().data_received(data)
        self._deadline.set(not self._is_refused and self.conn.their_state is h11.IDLE)

    def _on_late(self) -> None:
        self._is_refused = True
        if self._has_begun:
            refuse(self.transport, self.cycle, HEADERS_TOO_SLOW)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; called while the parser's complaint is being handled."""
        self._is_refused = True
        complaint = sys.exception()
        too_large = (
            isinstance(complaint, h11.RemoteProtocolError) and complaint.error_status_hint == 431
        )
        refuse(self.transport, self.cycle, HEADERS_TOO_LARGE if too_large else NO_HTTP)
