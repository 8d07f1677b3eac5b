"""The draft service as a Ray Serve deployment. Knows Serve; the service itself does not."""

from __future__ import annotations

import ray
from ray import serve

from specserve.config import DraftConfig
from specserve.draft.server import start_draft
from specserve.rpc.serve_hooks import ServiceReplica, threads_per_engine


@serve.deployment(name="draft")
class DraftDeployment(ServiceReplica):
    """One draft replica: Serve places, supervises and drains it; tokens travel over its gRPC."""

    role = "draft"

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, config: DraftConfig
    ) -> None:
        server = config.server
        if server.port:
            # Replicas that share a node take neighbouring ports, which network policies can name.
            rank = serve.get_replica_context().rank
            port = server.port + (rank.local_rank if rank is not None else 0)
            server = server.model_copy(update={"port": port})
        engine = config.engine
        if engine is not None and engine.num_threads is None:
            # Ray sets OMP_NUM_THREADS from num_cpus, which is a fraction here: say it ourselves.
            cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
            threads = int(cpus) if cpus >= 1 else threads_per_engine()
            engine = engine.model_copy(update={"num_threads": threads})
        config = config.model_copy(update={"server": server, "engine": engine})
        self.run_service(await start_draft(config), server.drain_deadline_s)

    async def __del__(self) -> None:
        await self.drain_and_stop()
