"""The gateway as a plain process: the HTTP application under uvicorn, stopped with grace.

Knows uvicorn; knows no Ray and no signal: whoever runs it cancels it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from specserve.gateway.backend import GenerationBackend
from specserve.gateway.config import GatewayConfig
from specserve.gateway.drain import Drain
from specserve.gateway.http import create_http_app
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.refusing import MAX_HEADER_BYTES, parser_class
from specserve.gateway.replica_gauges import keep_gauges
from specserve.gateway.sending import SEND_SLACK_S
from specserve.telemetry import Tracing

if TYPE_CHECKING:  # it brings the tokenizer library along, which a fake does not need
    from specserve.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MAX_USER_TIMEOUT_MS = 2**31 - 1

CLOSE_TIMEOUT_S = 1
"""How long connections may take to close once every request has ended or was given up."""


class _Server(uvicorn.Server):
    """A server that leaves signals to the process that runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: the process has more to stop than this."""
        yield


async def serve_gateway(
    config: GatewayConfig,
    backend: GenerationBackend,
    tokenizer: Tokenizer,
    on_listening: Callable[[str, int], None] | None = None,
    tracing: Tracing | None = None,
    metrics: GatewayMetrics | None = None,
) -> None:
    """Serve until cancelled; then refuse new requests and let running ones finish for a while.

    Cancelled a second time it gives them up at once.

    Args:
        on_listening: told the host and the port once connections are taken; port 0 in the
            configuration lets the system choose the latter.
        tracing: where spans go; the caller shuts it down.
        metrics: where to count; None makes a registry of its own.

    Raises:
        OSError: the address cannot be listened on.
    """
    tracing, metrics = tracing or Tracing(), metrics or GatewayMetrics()
    listener = listen(config.host, config.port, config.request_timeout_s + SEND_SLACK_S)
    drain = Drain()
    server = _Server(
        uvicorn.Config(
            create_http_app(
                backend, tokenizer, config, metrics=metrics, tracing=tracing, drain=drain
            ),
            # What the parser itself refuses has OpenAI's shape too, but for two things: garbage
            # that comes while an answer is under way, which can only end the connection, and a
            # request that never ends, which gets no answer at all. Under Ray Serve the parser is
            # in Serve's proxy, which takes none of ours: there these refusals are its plain text.
            http=parser_class(),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            lifespan="off",
        )
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    refreshing = asyncio.create_task(keep_gauges(backend, metrics)) if tracing.is_pushing else None
    try:
        host, port = listener.getsockname()[:2]
        logger.info("gateway listens on http://%s:%d", host, port)
        if on_listening is not None:
            on_listening(host, port)
        await asyncio.shield(running)
    finally:
        try:
            await drain.drain(config.shutdown_grace_s)
        except asyncio.CancelledError:
            await drain.drain(0)
            raise
        finally:
            if refreshing is not None:
                refreshing.cancel()
            server.should_exit = True
            await running
            listener.close()
            await backend.close()


def listen(host: str, port: int, unread_timeout_s: float) -> socket.socket:
    """Listen.

    Args:
        unread_timeout_s: how long what was sent may lie unread, where the system can count it:
            a closed connection is else kept, with all that it has still to send, for ever.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
            timeout_ms = min(int(unread_timeout_s * 1000), _MAX_USER_TIMEOUT_MS)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
