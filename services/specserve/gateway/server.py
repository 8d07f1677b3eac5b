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
from specserve.gateway.http import create_http_app

if TYPE_CHECKING:  # it brings the tokenizer library along, which a fake does not need
    from specserve.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


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
) -> None:
    """Serve until cancelled; then take no new requests and let running ones finish for a while.

    Args:
        on_listening: told the host and the port once connections are taken; port 0 in the
            configuration lets the system choose the latter.

    Raises:
        OSError: the address cannot be listened on.
    """
    listener = _listen(config.host, config.port)
    server = _Server(
        uvicorn.Config(
            create_http_app(backend, tokenizer, config),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=round(config.shutdown_grace_s),
            lifespan="off",
        )
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        host, port = listener.getsockname()[:2]
        logger.info("gateway listens on http://%s:%d", host, port)
        if on_listening is not None:
            on_listening(host, port)
        await asyncio.shield(running)
    finally:
        server.should_exit = True
        await running
        listener.close()
        await backend.close()


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
