"""A pair of plain processes that is broken on purpose: each service keeps its port over restarts.

Three targets, two drafts, two orchestrators, two gateways. Orchestrators reach one target and one
draft through a proxy of frames, another of each through one of bytes, and the gateways one
orchestrator through bytes too. Knows processes and addresses; knows no plan.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from chaos.line_proxy import LineProxy
from chaos.members import Member, Timing, held_by
from helpers.frame_proxy import frames_to
from helpers.waiting import eventually
from specserve.rpc.channel import open_channel
from specserve.rpc.v1 import generation_pb2_grpc
from specserve.rpc.v1.generation_pb2 import GetPairRequest, GetStatusRequest
from specserve.tools.held_port import HeldPort

VOCAB_SIZE = 64
FATAL_TOKEN_ID = 0
"""Ends every device that computes it; it is never drawn, and no ordinary prompt has it."""
TARGET = f"toy:vocab_size={VOCAB_SIZE},seed=7,eos_bias=-1000,fatal_token={FATAL_TOKEN_ID}"
DRAFT = f"{TARGET},noise=0.6,noise_seed=1"
READY_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Shape:
    """How many of each, and how fast they are."""

    num_targets: int = 3
    num_drafts: int = 2
    num_orchestrators: int = 2
    num_gateways: int = 2
    step_ms: float = 12.0
    timing: Timing = field(default_factory=Timing)
    target: str = TARGET
    draft: str = DRAFT
    engine_flags: tuple[str, ...] = ("--max-model-len=4096", "--num-kv-blocks=2048")


@dataclass(slots=True)
class Cluster:
    """Every member."""

    targets: list[Member] = field(default_factory=list)
    drafts: list[Member] = field(default_factory=list)
    orchestrators: list[Member] = field(default_factory=list)
    gateways: list[Member] = field(default_factory=list)

    @property
    def members(self) -> list[Member]:
        """All of them, those that others depend on last."""
        return [*self.gateways, *self.orchestrators, *self.drafts, *self.targets]

    def of(self, role: str) -> list[Member]:
        """Return the members of a role."""
        return [member for member in self.members if member.role == role]

    def urls(self) -> list[str]:
        """Return where clients may ask: a gateway that is being stopped is not listed any more."""
        free = [gateway for gateway in self.gateways if not gateway.is_faulted]
        return [f"http://{gateway.address}" for gateway in free or self.gateways]

    async def stop(self) -> None:
        """Stop every process: first who asks, then who answers."""
        for layer in (self.gateways, self.orchestrators, [*self.drafts, *self.targets]):
            await asyncio.gather(*(member.process.stop() for member in layer if member.process))

    async def revive(self) -> list[str]:
        """Start anew whatever ended by itself; returns their names."""
        ended = [
            member
            for member in self.members
            if not member.is_faulted and member.running.returncode is not None
        ]
        for member in ended:
            await member.restart()
        return [member.name for member in ended]

    async def leaks(self, within_s: float) -> list[str]:
        """Wait until no service holds anything; returns what is still held when time is over."""
        held: list[str] = []

        async def look() -> bool:
            held[:] = [found for member in self.members if (found := await held_by(member))]
            return not held

        with contextlib.suppress(AssertionError):
            await eventually(look, "nothing is held", within_s, every_s=0.25)
        return held


@asynccontextmanager
async def running_cluster(shape: Shape) -> AsyncIterator[Cluster]:
    """Start everything, and stop it."""
    cluster = Cluster()
    async with AsyncExitStack() as stack:

        def hold_port() -> int:
            port = HeldPort()
            stack.callback(port.release)
            return port.number

        stack.push_async_callback(cluster.stop)
        server = (f"--lease-s={shape.timing.lease_s}", "--drain-deadline-s=8")
        speculative = f'{{"model": "{shape.draft},step_ms=1", "num_speculative_tokens": 4}}'
        is_toy = shape.target.startswith("toy:")
        if not is_toy:
            speculative = f'{{"model": "{shape.draft}", "num_speculative_tokens": 4}}'
        config = f"--speculative-config={speculative}"
        model = f"{shape.target},step_ms={shape.step_ms}" if is_toy else shape.target
        for number in range(shape.num_targets):
            flags = (model, *shape.engine_flags, *server)
            cluster.targets.append(Member(f"target-{number}", "target", hold_port(), flags))
        for number in range(shape.num_drafts):
            flags = (config, *shape.engine_flags, *server)
            cluster.drafts.append(Member(f"draft-{number}", "draft", hold_port(), flags))
        peers = [
            f"--{member.role}-address={await _front(stack, member, number)}"
            for members in (cluster.targets, cluster.drafts)
            for number, member in enumerate(members)
        ]
        timing = (
            f"--device-hang-s={shape.timing.hang_s}",
            "--heartbeat-s=0.5",
            "--draft-timeout-s=0.5",
            f"--target-timeout-s={shape.timing.call_s}",
        )
        fronts = []
        for number in range(shape.num_orchestrators):
            flags = (*peers, config, *timing, "--drain-deadline-s=3")
            member = Member(f"orchestrator-{number}", "orchestrator", hold_port(), flags)
            cluster.orchestrators.append(member)
            # 1 + number: the first one through a proxy of bytes.
            address = await _front(stack, member, 1 + number)
            fronts.append(f"--orchestrator-address={address}")
        for number in range(shape.num_gateways):
            flags = (
                f"--tokenizer={shape.target}",
                *fronts,
                f"--orchestrator-hang-s={shape.timing.hang_s}",
                "--failover-timeout-s=60",
                "--shutdown-grace-s=14",
            )
            cluster.gateways.append(Member(f"gateway-{number}", "gateway", hold_port(), flags))
        for member in cluster.members:
            member.timing = shape.timing
            await member.start()
        await asyncio.gather(*(member.running.wait_ready() for member in cluster.members))
        await _until_known(cluster)
        yield cluster


async def _front(stack: AsyncExitStack, member: Member, number: int) -> str:
    """Put a proxy before the first two of a kind; returns where the member is to be reached."""
    if number > 1:
        return member.address
    if number == 0:
        member.frames, address = await stack.enter_async_context(frames_to(member.address))
        return address
    member.line = LineProxy("127.0.0.1", member.port)
    stack.push_async_callback(member.line.close)
    return await member.line.start()


async def _until_known(cluster: Cluster) -> None:
    """Wait until every orchestrator may use every replica."""
    wanted = len(cluster.targets) + len(cluster.drafts)
    for member in cluster.orchestrators:
        async with open_channel(member.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)

            async def knows_all(stub: generation_pb2_grpc.GenerationServiceStub = stub) -> bool:
                pair = await stub.GetPair(GetPairRequest(), timeout=READY_TIMEOUT_S)
                status = await stub.GetStatus(GetStatusRequest(), timeout=READY_TIMEOUT_S)
                states = [replica.state for replica in status.replicas]
                return bool(
                    pair.ready and pair.speculation_enabled and states == ["connected"] * wanted
                )

            await eventually(knows_all, f"{member.name} knows all", READY_TIMEOUT_S, every_s=0.05)
