"""A replica and its gRPC server as one running service. Shared by draft and target."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc
from prometheus_client import CollectorRegistry

from specserve.config import ServerConfig
from specserve.rpc.metrics_endpoint import LoadCollector, MetricsEndpoint
from specserve.rpc.replica import ReplicaServer
from specserve.rpc.server import GrpcServer
from specserve.rpc.tls import MutualTls


class BusyShare:
    """The share of the time that a device computed, between one question and the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = (clock(), 0.0)

    def share(self, busy_s: float) -> float:
        """Return it, in [0, 1].

        Args:
            busy_s: seconds of forwards so far; less than before once the device was replaced.
        """
        (then, before), now = self._asked, self._clock()
        self._asked = (now, busy_s)
        if now <= then or busy_s < before:
            return 0.0
        return min(1.0, (busy_s - before) / (now - then))


class ReplicaService:
    """A started replica with its server (a `RunningService`)."""

    def __init__(self, replica: ReplicaServer, server: GrpcServer) -> None:
        self.replica = replica
        self._server = server
        self._busy = BusyShare()

    @classmethod
    async def start(
        cls,
        replica: ReplicaServer,
        role: str,
        config: ServerConfig,
        service_name: str,
        register: Callable[[grpc.aio.Server], None],
    ) -> ReplicaService:
        """Start the device, then serve; on failure nothing is left running."""
        registry = CollectorRegistry()
        server = GrpcServer(config, [service_name], registry, MutualTls.of(config))
        await replica.start()
        registry.register(LoadCollector(role, lambda: replica.device.load))
        replica.tracing.export_metrics(registry)
        try:
            await server.start(register)
        except BaseException:
            await replica.stop()
            raise
        return cls(replica, server)

    @property
    def address(self) -> str:
        """host:port that peers dial."""
        return self._server.address

    @property
    def replica_id(self) -> str:
        """Identity of this replica, new with every start."""
        return self.replica.replica_id

    @property
    def metrics(self) -> MetricsEndpoint | None:
        """This service's own /metrics, where a port was given."""
        return self._server.metrics

    async def drain(self, deadline_s: float) -> None:
        """Refuse opens, tell clients, wait until no session is left or the deadline passes."""
        await self._server.refuse_health()
        await self.replica.drain(deadline_s)

    async def stop(self) -> None:
        """Stop serving, then the device."""
        self.replica.end_streams()
        await self._server.stop()
        await self.replica.stop()

    def failure(self) -> str | None:
        """Say why this replica can no longer serve; None while it can."""
        return self.replica.failure()

    def stats(self) -> dict[str, float]:
        """Give the load for autoscaling: sessions, calls that wait, and for how long, KV, time."""
        load = self.replica.device.load
        used = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
        return {
            "num_sessions": float(self.replica.num_sessions),
            "num_waiting": float(load.num_waiting),
            "kv_cache_usage": used,
            "queue_s": load.queue_s,
            "busy_share": self._busy.share(load.busy_s),
        }
