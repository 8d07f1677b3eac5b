"""Starts a target replica: device, servicer, gRPC server."""

from __future__ import annotations

import asyncio
import os

import grpc

from specserve import telemetry
from specserve.config import TargetConfig
from specserve.model.device import Device, create_device
from specserve.model.tokenizer import load_tokenizer
from specserve.rpc.replica import ReplicaServer
from specserve.rpc.replica_service import ReplicaService
from specserve.rpc.server import new_replica_id
from specserve.rpc.v1 import target_pb2, target_pb2_grpc
from specserve.speculation.planted_faults import wanted_fault
from specserve.target.servicer import TargetServicer, TargetWire


async def start_target(config: TargetConfig) -> ReplicaService:
    """Load the target model and serve it.

    Raises:
        ConfigurationError: the model cannot be rolled back, or a port cannot be bound.
        ModelUnavailable: the model cannot be loaded.
    """
    wanted_fault(os.environ)  # refuses, in this process already, what its device would refuse
    tracing = telemetry.start_tracing("specserve-target")
    tokenizer = await asyncio.to_thread(load_tokenizer, config.engine)

    async def start_device() -> Device:
        device = create_device(config.engine, "target", None)
        await device.start()
        return device

    replica = ReplicaServer(
        new_replica_id("target"),
        TargetWire(),
        start_device,
        config.server.lease_s,
        config.server.device_restart_s,
        tracing=tracing,
    )

    def register(server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(
            TargetServicer(replica, tokenizer), server
        )

    name = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
    return await ReplicaService.start(replica, "target", config.server, name, register)
