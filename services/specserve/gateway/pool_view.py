"""`/v1/specserve/pool`: orchestrators, replicas and what drafting brings, as of now.

For people and small scripts; dashboards read /metrics. Knows statuses and counters; no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi import FastAPI
from starlette.responses import Response

from specserve.gateway.answers import Answer
from specserve.gateway.backend import GenerationBackend
from specserve.gateway.metrics import GatewayMetrics
from specserve.rpc.v1 import generation_pb2
from specserve.rpc.v1.generation_pb2 import GetStatusResponse, ReplicaStatus

PATH = "/v1/specserve/pool"

_MODES = {
    generation_pb2.SPECULATION_MODE_OFF: "off",
    generation_pb2.SPECULATION_MODE_ON: "on",
    generation_pb2.SPECULATION_MODE_AUTO: "auto",
}


class OrchestratorView(Answer):
    """One orchestrator."""

    orchestrator_id: str
    """Identity of the process."""
    num_running: int
    """Choices being decoded."""
    num_waiting: int
    """Choices that wait for a target."""
    num_rounds: int
    """Rounds committed since it started."""
    cpu_s: float
    """Processor seconds it has used."""
    speculation_mode: str
    """How K is chosen: off, on or auto."""


class ReplicaView(Answer):
    """One draft or target replica."""

    role: str
    """draft or target."""
    replica_id: str
    """Identity of the process; empty while it was not reached yet."""
    state: str
    """connected, connecting or draining."""
    num_sessions: int
    """Sessions held."""
    num_waiting: int
    """Calls before their first forward."""
    kv_cache_usage: float
    """Share of its KV blocks in use, 0 to 1."""


class PoolView(Answer):
    """Everything, as of now."""

    orchestrators: list[OrchestratorView]
    """Those that answered."""
    replicas: list[ReplicaView]
    """Those that they know."""
    num_drafts: int
    """Rounds that verified draft tokens, of this gateway's choices."""
    num_draft_tokens: int
    """Draft tokens verified."""
    num_accepted_draft_tokens: int
    """Draft tokens accepted and emitted."""
    accepted_per_position: list[int]
    """Entry i: rounds whose draft token i was accepted."""


def add_pool_route(app: FastAPI, backend: GenerationBackend, metrics: GatewayMetrics) -> None:
    """Add the route."""

    @app.get(PATH, responses={200: {"model": PoolView}})
    async def pool() -> Response:
        """Describe orchestrators, replicas and acceptance."""
        view = pool_view(await backend.get_status(), metrics)
        return Response(view.model_dump_json(), media_type="application/json")


def pool_view(statuses: Sequence[GetStatusResponse], metrics: GatewayMetrics) -> PoolView:
    """Put together what orchestrators say and what this gateway has counted."""
    counts = metrics.draft_counts()
    return PoolView(
        orchestrators=[
            OrchestratorView(
                orchestrator_id=status.orchestrator_id,
                num_running=status.num_running,
                num_waiting=status.num_waiting,
                num_rounds=status.num_rounds,
                cpu_s=status.cpu_s,
                speculation_mode=_MODES.get(status.speculation_mode, "unknown"),
            )
            for status in statuses
        ],
        replicas=_replicas(replica for status in statuses for replica in status.replicas),
        num_drafts=counts.num_drafts,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_draft_tokens=counts.num_accepted,
        accepted_per_position=counts.accepted_per_position,
    )


def _replicas(found: Iterable[ReplicaStatus]) -> list[ReplicaView]:
    """Show each replica once: by the orchestrator whose report of it has most to tell."""
    views: dict[tuple[str, str], ReplicaView] = {}
    for replica in found:
        load = replica.load
        # Where it listens is no client's affair: it only tells two of them apart.
        key = (replica.role, replica.replica_id or replica.address)
        view = ReplicaView(
            role=replica.role,
            replica_id=replica.replica_id,
            state=replica.state,
            num_sessions=load.num_sessions,
            num_waiting=load.num_waiting,
            kv_cache_usage=1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
        )
        known = views.get(key)
        if known is None or known.state != "connected":
            views[key] = view
    return [views[key] for key in sorted(views)]
