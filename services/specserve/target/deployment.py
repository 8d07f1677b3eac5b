"""The target service as a Ray Serve deployment. Knows Serve; the service itself does not."""

from __future__ import annotations

import ray
from ray import serve

from specserve.config import TargetConfig
from specserve.rpc.placement import placed
from specserve.rpc.serve_hooks import ServiceReplica
from specserve.target.server import start_target
from specserve.telemetry.logs import configure_from_environment


@serve.deployment(name="target")
class TargetDeployment(ServiceReplica):
    """One target replica: Serve places, supervises and drains it; tokens travel over its gRPC."""

    role = "target"

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, config: TargetConfig
    ) -> None:
        configure_from_environment()
        rank = serve.get_replica_context().rank
        local_rank = rank.local_rank if rank is not None else 0
        num_cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
        config = placed(config, local_rank, num_cpus)
        self.run_service(await start_target(config), config.server.drain_deadline_s)

    async def __del__(self) -> None:
        await self.drain_and_stop()
