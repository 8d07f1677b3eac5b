"""The orchestrator as a Ray Serve deployment, and how it finds drafts and targets.

Knows Serve handles, over which addresses travel and nothing else.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from specserve.config import OrchestratorConfig
from specserve.orchestrator.server import start_orchestrator
from specserve.rpc.placement import placed_server
from specserve.rpc.serve_hooks import (
    DISCOVERY_PERIOD_S,
    DISCOVERY_TIMEOUT_S,
    PoolView,
    PoolWatcher,
    ServiceReplica,
    view_of,
    watch_pools,
)
from specserve.telemetry.logs import configure_from_environment


@serve.deployment(name="orchestrator")
class OrchestratorDeployment(ServiceReplica):
    """One orchestrator replica; learns every draft and target address by broadcast."""

    role = "orchestrator"

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self,
        config: OrchestratorConfig,
        target: DeploymentHandle[Any],
        draft: DeploymentHandle[Any] | None,
    ) -> None:
        configure_from_environment()
        rank = serve.get_replica_context().rank
        server = placed_server(config.server, rank.local_rank if rank is not None else 0)
        config = config.model_copy(update={"server": server})
        self._orchestrator = await start_orchestrator(config)
        self._known = config
        self._targets = PoolWatcher("target", lambda: look(target))
        self._drafts = PoolWatcher("draft", lambda: look(draft)) if draft is not None else None
        watchers = [self._targets, *([self._drafts] if self._drafts is not None else [])]
        self._watching = asyncio.create_task(
            watch_pools(watchers, self._tell_peers, DISCOVERY_PERIOD_S), name="discovery"
        )
        self.run_service(self._orchestrator, config.server.drain_deadline_s)

    async def _tell_peers(self) -> None:
        drafts = self._drafts.addresses if self._drafts is not None else ()
        self._orchestrator.update_peers(
            (*self._known.target_addresses, *self._targets.addresses),
            (*self._known.draft_addresses, *drafts),
        )

    async def __del__(self) -> None:
        # Drain first: requests that are finishing may still need a replica to move to.
        await self.drain_and_stop()
        watching: asyncio.Task[None] | None = getattr(self, "_watching", None)
        if watching is not None:
            watching.cancel()


async def look(handle: DeploymentHandle[Any]) -> PoolView:
    """Ask every replica of a deployment for its address."""
    answers = await handle.broadcast("address").results_async(
        timeout_s=DISCOVERY_TIMEOUT_S, return_exceptions=True
    )
    return view_of(answers)
