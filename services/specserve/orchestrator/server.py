"""Starts an orchestrator: pools, servicer, gRPC server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

import grpc
from prometheus_client import CollectorRegistry

from specserve import telemetry
from specserve.config import OrchestratorConfig
from specserve.orchestrator.admin import AdminServicer
from specserve.orchestrator.length_control import LengthControl
from specserve.orchestrator.length_metrics import LengthCollector
from specserve.orchestrator.pair import Pair
from specserve.orchestrator.pool import DraftLink, TargetLink
from specserve.orchestrator.pool_metrics import PoolCollector
from specserve.orchestrator.process_metrics import ProcessCollector
from specserve.orchestrator.proposers import Proposers
from specserve.orchestrator.recent_requests import RecentRequests
from specserve.orchestrator.recent_requests_servicer import RecentRequestsServicer
from specserve.orchestrator.request_log import RequestLog
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.round_counts import RoundCounts
from specserve.orchestrator.servicer import GenerationServicer
from specserve.orchestrator.synthetic import synthetic_acceptance
from specserve.orchestrator.verified_gate import VERIFIED, VerifiedGate
from specserve.orchestrator.verified_pair import PairVerification, VerifiedCollector
from specserve.rpc.server import GrpcServer, new_replica_id
from specserve.rpc.tls import MutualTls
from specserve.rpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    requests_pb2,
    requests_pb2_grpc,
)
from specserve.speculation.length_choice import SpeculationMode
from specserve.speculation.planted_faults import plant, wanted_fault

logger = logging.getLogger(__name__)


class RunningOrchestrator:
    """A started orchestrator (a `RunningService`)."""

    def __init__(
        self,
        replica_id: str,
        pair: Pair,
        servicer: GenerationServicer,
        length: LengthControl,
        registry: CollectorRegistry,
        server: GrpcServer,
        tracing: telemetry.Tracing,
    ) -> None:
        self.replica_id = replica_id
        self.pair = pair
        self.servicer = servicer
        self.length = length
        self.registry = registry
        """What /metrics shows."""
        self._server = server
        self._tracing = tracing

    @property
    def address(self) -> str:
        """host:port that gateways dial."""
        return self._server.address

    def update_peers(self, target_addresses: Sequence[str], draft_addresses: Sequence[str]) -> None:
        """Know exactly these replicas. Idempotent."""
        self.pair.update_peers(target_addresses, draft_addresses)

    async def drain(self, deadline_s: float) -> None:
        """Take no new choices; wait until none is running or the deadline passes."""
        await self._server.refuse_health()
        self.servicer.start_drain()
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while self.servicer.num_running and loop.time() < end:  # noqa: ASYNC110 - rare, and bounded
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop serving, then drop the links; what is left is cancelled and its KV freed."""
        await self._server.stop()
        await self.pair.close()
        await asyncio.to_thread(self._tracing.shutdown)

    def failure(self) -> str | None:
        """Say why this orchestrator can no longer serve; None while it can."""
        return None

    def stats(self) -> dict[str, float]:
        """Give the load for autoscaling."""
        return {
            "num_running": float(self.servicer.num_running),
            "num_waiting": float(self.servicer.num_waiting),
            "draft_demand": self.length.draft_demand(round(self.pair.targets.mean_sessions)),
            "num_draftable": float(self.length.num_draftable),
        }


async def start_orchestrator(config: OrchestratorConfig) -> RunningOrchestrator:
    """Serve; peers may still be loading and are found when they come.

    Raises:
        ConfigurationError: the port cannot be bound, certificates cannot be read, or settings
            contradict one another.
    """
    fault = wanted_fault(os.environ)
    if fault is not None:
        logger.error("PLANTED FAULT %s: this process answers wrong on purpose", fault)
        plant(fault)
    tracing = telemetry.start_tracing("specserve-orchestrator")
    replica_id = new_replica_id("orchestrator")
    tls = MutualTls.of(config.server)
    pair = Pair(config, tls)
    metrics = telemetry.RoundMetrics()
    proposers = Proposers(config, pair.drafts)
    gate = VerifiedGate(config)

    def refusal(state: RequestState, target: TargetLink | None, draft: DraftLink | None) -> str:
        if not gate.is_required or state.method is None:
            return VERIFIED
        return gate.refusal(state.sampling.rule, state.method, *pair.models(target, draft))

    length = LengthControl(config, refusal=refusal)
    verified = PairVerification(gate, pair)
    ring = RecentRequests(config.num_recent_requests, config.recent_requests_bytes)
    log = RequestLog(ring, RoundCounts(metrics), tracing, replica_id)
    servicer = GenerationServicer(
        config, pair, proposers, length, metrics, replica_id, log, verified
    )
    metrics.registry.register(
        LengthCollector(
            length,
            lambda: (
                length.mode is not SpeculationMode.OFF and pair.may_draft and verified.may_speculate
            ),
        )
    )
    metrics.registry.register(PoolCollector(pair.pools))
    metrics.registry.register(
        ProcessCollector(
            lambda: servicer.num_rounds, lambda: servicer.num_running, lambda: servicer.num_waiting
        )
    )
    if gate.is_required:
        metrics.registry.register(VerifiedCollector(verified))
    if config.draft_addresses and pair.drafts is None:
        logger.warning(
            "draft addresses are given, but no draft will be asked: num_speculative_tokens is 0 "
            "or the method needs no draft (speculation_enabled %d)",
            pair.may_draft,
        )
    synthetic = synthetic_acceptance(config.speculative)
    if synthetic is not None:
        logger.warning(
            "rejection_sample_method synthetic: draft tokens are accepted by the rates %s, NOT by "
            "the target. The text is no model's output; this is for benchmarks only",
            ", ".join(f"{rate:.3g}" for rate in synthetic.rates),
        )
    admin = AdminServicer(length, replica_id, lambda: servicer.num_running)
    names = [
        generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
        requests_pb2.DESCRIPTOR.services_by_name["RecentRequestsService"].full_name,
    ]
    server = GrpcServer(config.server, names, metrics.registry, tls)

    def register(grpc_server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, grpc_server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, grpc_server)
        requests_pb2_grpc.add_RecentRequestsServiceServicer_to_server(
            RecentRequestsServicer(ring), grpc_server
        )

    await server.start(register)
    pair.start()
    tracing.export_metrics(metrics.registry)
    return RunningOrchestrator(
        replica_id, pair, servicer, length, metrics.registry, server, tracing
    )
