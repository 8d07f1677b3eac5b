"""What every specserve process with a gRPC server does alike: bind, health, reflection, stop."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from specserve.config import ServerConfig
from specserve.errors import ConfigurationError
from specserve.rpc.channel import SERVER_OPTIONS
from specserve.rpc.interceptor import StatusInterceptor
from specserve.rpc.metrics_endpoint import MetricsEndpoint
from specserve.rpc.tls import MutualTls

STOP_GRACE_S = 2.0
"""How long calls in flight may still end after a server was told to stop."""


class RunningService(Protocol):
    """One running service, as a command line or a Serve deployment handles it."""

    @property
    def address(self) -> str:
        """host:port that peers dial."""
        ...

    @property
    def replica_id(self) -> str:
        """Identity of this process's service, new with every start."""
        ...

    async def drain(self, deadline_s: float) -> None:
        """Refuse opens, tell clients, and wait until no session is left or the deadline passes."""
        ...

    async def stop(self) -> None:
        """End at once what is left, and free everything."""
        ...

    def failure(self) -> str | None:
        """Say why this service can no longer serve; None while it can."""
        ...

    def stats(self) -> dict[str, float]:
        """Give the load for autoscaling."""
        ...


def new_replica_id(role: str) -> str:
    """Make an identity that no other process has had."""
    return f"{role}-{uuid.uuid4().hex[:12]}"


class GrpcServer:
    """A bound grpc.aio server with health and reflection, and /metrics where a port is given."""

    def __init__(
        self,
        config: ServerConfig,
        service_names: Sequence[str],
        registry: CollectorRegistry,
        tls: MutualTls | None = None,
    ) -> None:
        self._config = config
        self._registry = registry
        self.metrics: MetricsEndpoint | None = None
        self._names = list(service_names)
        self._tls = tls
        admit = None if tls is None else tls.admit()
        self._server = grpc.aio.server(
            interceptors=(StatusInterceptor(admit),), options=SERVER_OPTIONS
        )
        self._health = health.aio.HealthServicer()
        self.port = 0

    async def start(self, register: Callable[[grpc.aio.Server], None]) -> None:
        """Bind, register and serve.

        Raises:
            ConfigurationError: a port is taken or the host is not this machine's.
        """
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        wanted = f"{_bracketed(self._config.host)}:{self._config.port}"
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(wanted)
            else:
                self.port = self._server.add_secure_port(wanted, self._tls.server_credentials())
        except RuntimeError as error:
            raise ConfigurationError(f"cannot bind {wanted}: {error}") from error
        if self.port == 0:
            raise ConfigurationError(f"cannot bind {wanted}: is the port taken?")
        self.metrics = MetricsEndpoint.start(self._config, self._registry)
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    @property
    def address(self) -> str:
        """host:port that peers dial."""
        host = self._config.advertise_host or self._config.host
        if host in ("0.0.0.0", "::", "[::]"):  # noqa: S104 - compared, not bound
            host = own_address()
        return f"{_bracketed(host)}:{self.port}"

    async def refuse_health(self) -> None:
        """Answer NOT_SERVING from now on."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self) -> None:
        """Stop accepting, give calls in flight a short grace, and end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(STOP_GRACE_S)
        if self.metrics is not None:
            await self.metrics.stop()

    async def _set_health(self, status: Any) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def own_address() -> str:
    """Find the address that other machines reach this one by; loopback when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # No packet is sent: connect() on UDP only picks the outgoing interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
