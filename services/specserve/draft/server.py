"""Starts a draft replica: device, servicer, gRPC server."""

from __future__ import annotations

import asyncio
import os

import grpc

from specserve import telemetry
from specserve.config import DraftConfig
from specserve.draft.servicer import DraftServicer, DraftWire
from specserve.model.device import Device, create_device
from specserve.model.tokenizer import load_tokenizer
from specserve.rpc.replica import ReplicaServer
from specserve.rpc.replica_service import ReplicaService
from specserve.rpc.server import new_replica_id
from specserve.rpc.v1 import draft_pb2, draft_pb2_grpc
from specserve.speculation.planted_faults import wanted_fault


async def start_draft(config: DraftConfig) -> ReplicaService:
    """Load the draft model and serve it.

    Raises:
        ConfigurationError: a port that cannot be bound.
        ModelUnavailable: the draft model cannot be loaded.
    """
    wanted_fault(os.environ)  # refuses, in this process already, what its device would refuse
    tracing = telemetry.start_tracing("specserve-draft")
    tokenizer = await asyncio.to_thread(load_tokenizer, config.engine)

    async def start_device() -> Device:
        device = create_device(config.engine, "draft", config.speculative)
        await device.start()
        return device

    replica = ReplicaServer(
        new_replica_id("draft"),
        DraftWire(),
        start_device,
        config.server.lease_s,
        config.server.device_restart_s,
        tracing=tracing,
    )

    def register(server: grpc.aio.Server) -> None:
        servicer = DraftServicer(replica, tokenizer, config.speculative)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)

    name = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
    return await ReplicaService.start(replica, "draft", config.server, name, register)
