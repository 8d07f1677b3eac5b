"""`refusing.py` for the parser in C, which an installation may lack and which bounds no headers."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http import httptools_impl

from specserve.gateway.errors import HttpError
from specserve.gateway.refusing import (
    HEADERS_TOO_LARGE,
    HEADERS_TOO_SLOW,
    MAX_HEADER_BYTES,
    NO_HTTP,
    HeaderDeadline,
    refuse,
)


class RefusingHttpTools(httptools_impl.HttpToolsProtocol):
    """The parser in C."""

    _is_refused = False
    _has_begun = False
    _in_headers = False
    _num_header_bytes = 0
    """Bytes received since the request that is being read began, up to its body."""

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
        """Read on, unless this connection was refused or its headers never end."""
        if self._is_refused:
            return
        self._has_begun = True
        super().data_received(data)
        self._deadline.set(self._in_headers and not self._is_refused)
        if self._in_headers and not self._is_refused:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._in_headers, self._num_header_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Start the application."""
        self._in_headers = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(NO_HTTP)

    def _on_late(self) -> None:
        if self._has_begun:
            self._refuse(HEADERS_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, error: HttpError) -> None:
        self._is_refused = True
        if self.pipeline:
            # A request before these is being answered, and nothing can be put into the middle.
            self.transport.close()
        else:
            refuse(self.transport, self.cycle, error)
