"""The gateway as the application's Serve ingress, and how it finds orchestrators.

Serve's proxy brings HTTP in and carries the answer out as it is written; decoding is asked for over
gRPC, so that no token crosses a Serve handle.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from specserve import telemetry
from specserve.config import EngineConfig
from specserve.gateway.config import GatewayConfig
from specserve.gateway.drain import Drain
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.http import create_http_app
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.replica_gauges import keep_gauges
from specserve.model.tokenizer import load_tokenizer
from specserve.rpc.serve_hooks import (
    DISCOVERY_PERIOD_S,
    DISCOVERY_TIMEOUT_S,
    PoolView,
    PoolWatcher,
    ReplicaDescription,
    view_of,
    watch_pools,
)
from specserve.rpc.tls import MutualTls
from specserve.telemetry.logs import configure_from_environment


@serve.deployment(name="gateway")
@serve.ingress()
class GatewayDeployment:
    """One gateway replica: stateless, as many as HTTP needs."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, config: GatewayConfig, target: EngineConfig, orchestrator: DeploymentHandle[Any]
    ) -> None:
        configure_from_environment()
        self._tracing = telemetry.start_tracing("specserve-gateway")
        self._tokenizer = await asyncio.to_thread(load_tokenizer, target)
        self._config = config
        self._drain = Drain()
        self._metrics = GatewayMetrics()
        self._backend = GrpcBackend(
            (), config.failover_timeout_s, MutualTls.of(config), config.orchestrator_hang_s
        )
        self._backend.on_failover = self._metrics.count_failover
        self._refreshing: asyncio.Task[None] | None = None
        if self._tracing.is_on:
            self._refreshing = asyncio.create_task(keep_gauges(self._backend, self._metrics))
        self._orchestrators = PoolWatcher("orchestrator", lambda: look(orchestrator))
        self._watching = asyncio.create_task(
            watch_pools([self._orchestrators], self._tell_backend, DISCOVERY_PERIOD_S),
            name="discovery",
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the HTTP application; Serve calls this after the constructor."""
        return create_http_app(
            self._backend,
            self._tokenizer,
            self._config,
            metrics=self._metrics,
            tracing=self._tracing,
            drain=self._drain,
        )

    async def describe(self) -> ReplicaDescription:
        """Return who and where this replica is, for people."""
        return ReplicaDescription("gateway", "", f"gateway-{os.getpid()}", os.getpid())

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and return once none is running or the grace is over.

        To be called before the application is deleted: with it go Serve's proxies, and they take
        every open stream with them. A replica that is merely scaled down needs no such call.
        """
        await self._drain.drain(grace_s)

    async def _tell_backend(self) -> None:
        await self._backend.set_addresses(self._orchestrators.addresses)

    async def __del__(self) -> None:
        # Serve has waited for the HTTP requests before it calls this.
        watching: asyncio.Task[None] | None = getattr(self, "_watching", None)
        if watching is not None:
            watching.cancel()
            if self._refreshing is not None:
                self._refreshing.cancel()
            await self._backend.close()
            await asyncio.to_thread(self._tracing.shutdown)


async def look(handle: DeploymentHandle[Any]) -> PoolView:
    """Ask every replica of a deployment for its address."""
    answers = await handle.broadcast("address").results_async(
        timeout_s=DISCOVERY_TIMEOUT_S, return_exceptions=True
    )
    return view_of(answers)
