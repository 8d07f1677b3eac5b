"""A replica and its gRPC server as one running service. Shared by draft and target."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from specserve.rpc.replica import ReplicaServer
from specserve.rpc.server import GrpcServer


class ReplicaService:
    """A started replica with its server (a `RunningService`)."""

    def __init__(self, replica: ReplicaServer, server: GrpcServer) -> None:
        self.replica = replica
        self._server = server

    @classmethod
    async def start(
        cls,
        replica: ReplicaServer,
        server: GrpcServer,
        register: Callable[[grpc.aio.Server], None],
    ) -> ReplicaService:
        """Start the device, then serve; on failure nothing is left running."""
        await replica.start()
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

    async def drain(self, deadline_s: float) -> None:
        """Refuse opens, tell clients, wait until no session is left or the deadline passes."""
        await self._server.refuse_health()
        await self.replica.drain(deadline_s)

    async def stop(self) -> None:
        """Stop serving, then the device."""
        await self._server.stop()
        await self.replica.stop()

    def failure(self) -> str | None:
        """Say why this replica can no longer serve; None while it can."""
        return self.replica.failure()

    def stats(self) -> dict[str, float]:
        """Give the load for autoscaling."""
        return self.replica.stats()
