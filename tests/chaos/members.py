"""One service of a cluster, whichever process it is at present, and what it still holds.

Knows a process and its address; knows no other member.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import grpc
import psutil

from chaos.line_proxy import LineProxy
from helpers.frame_proxy import FrameProxy
from specserve.rpc.channel import open_channel
from specserve.rpc.v1 import common_pb2, draft_pb2_grpc, generation_pb2_grpc, target_pb2_grpc
from specserve.rpc.v1.generation_pb2 import GetStatusRequest
from specserve.tools.local_process import LocalService, launch


@dataclass(frozen=True, slots=True)
class Timing:
    """After how long something counts as lost."""

    lease_s: float = 5.0
    hang_s: float = 3.0
    """Of a device, or an orchestrator, that is silent."""
    call_s: float = 8.0
    """Of a verify call without an answer."""


@dataclass(slots=True)
class Member:
    """One service, whichever process it is at present."""

    name: str
    role: str
    port: int
    flags: tuple[str, ...]
    process: LocalService | None = None
    frames: FrameProxy | None = None
    line: LineProxy | None = None
    timing: Timing = field(default_factory=Timing)
    is_faulted: bool = False
    """A fault has it in its hands."""
    faulted_at: float = 0.0

    @property
    def address(self) -> str:
        """Where it listens itself."""
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> LocalService:
        """Its process."""
        if self.process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self.process

    def device_pid(self) -> int | None:
        """Find its device process; None while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.running.pid).children()
            if children:
                return children[0].pid
        return None

    async def start(self) -> None:
        """Start a process on the port, without waiting for it."""
        self.process = await launch(self.role, (*self.flags, f"--port={self.port}"), {})

    async def restart(self) -> None:
        """Start anew what has ended, and wait until it is ready."""
        await self.running.stop()  # collects what is left of it
        await self.start()
        await self.running.wait_ready()


async def held_by(member: Member) -> str:
    """Say what a service still holds; empty for nothing."""
    if member.role == "gateway":
        return ""
    async with open_channel(member.address) as channel:
        try:
            if member.role == "orchestrator":
                front = generation_pb2_grpc.GenerationServiceStub(channel)
                status = await front.GetStatus(GetStatusRequest(), timeout=5)
                running = status.num_running + status.num_waiting
                return f"{member.name}: {running} requests" if running else ""
            make_stub = (
                target_pb2_grpc.TargetServiceStub
                if member.role == "target"
                else draft_pb2_grpc.DraftServiceStub
            )
            model = await make_stub(channel).GetModel(common_pb2.GetModelRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return f"{member.name}: {error.code().name}"
    load = model.load
    num_blocks = load.num_blocks - load.num_free_blocks
    if not num_blocks and not load.num_sessions:
        return ""
    return f"{member.name}: {num_blocks} blocks, {load.num_sessions} sessions"
