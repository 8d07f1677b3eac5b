"""A gateway on a port of this machine, before a pair of the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from helpers.pair import Pair
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.server import serve_gateway
from specserve.model.toy import ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer


@asynccontextmanager
async def running_gateway(pair: Pair, model: str, config: GatewayConfig) -> AsyncIterator[str]:
    """Serve over TCP; gives the URL.

    Args:
        model: the target's toy, whose tokenizer it has.
        config: with port 0.
    """
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    gateway = asyncio.create_task(
        serve_gateway(
            config,
            GrpcBackend([pair.orchestrator.address]),
            ToyTokenizer(ToySpec.parse(model)),
            lambda host, port: listening.set_result(f"http://{host}:{port}"),
        )
    )
    try:
        yield await listening
    finally:
        gateway.cancel()
        await asyncio.gather(gateway, return_exceptions=True)
