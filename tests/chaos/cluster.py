"""A pair of plain processes that is broken on purpose: each service keeps its port over restarts.

Three targets, two drafts, two orchestrators, two gateways. Orchestrators reach one target and one
draft through a proxy of frames, another of each through one of bytes, and the gateways one
orchestrator through bytes too. Knows processes and addresses; knows no plan.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import psutil

from helpers.frame_proxy import FrameProxy, frames_to
from helpers.scripted import Proxy
from specserve.rpc.channel import open_channel
from specserve.rpc.v1 import common_pb2, draft_pb2_grpc, generation_pb2_grpc, target_pb2_grpc
from specserve.rpc.v1.generation_pb2 import GetPairRequest, GetStatusRequest
from specserve.tools.held_port import HeldPort
from specserve.tools.local_process import LocalService, launch

VOCAB_SIZE = 64
TARGET = f"toy:vocab_size={VOCAB_SIZE},seed=7"
DRAFT = f"{TARGET},noise=0.6,noise_seed=1"
READY_TIMEOUT_S = 60.0


class LineProxy(Proxy):
    """A proxy of bytes that outlives the server behind it, and can hold everything back."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await super()._serve(reader, writer)
        except OSError:
            writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        gated = _GatedReader(reader, self._flowing)
        await super()._pump(gated, writer, replies=replies)  # type: ignore[arg-type]

    def stall(self) -> None:
        """Pass nothing on until `flow`."""
        self._flowing.clear()

    def flow(self) -> None:
        """Pass on what has waited."""
        self._flowing.set()


class _GatedReader:
    """A stream reader whose data waits while the gate is shut."""

    def __init__(self, reader: asyncio.StreamReader, gate: asyncio.Event) -> None:
        self._reader, self._gate = reader, gate

    async def read(self, size: int) -> bytes:
        data = await self._reader.read(size)
        await self._gate.wait()
        return data


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


@dataclass(slots=True)
class Shape:
    """How many of each, and how fast they are."""

    num_targets: int = 3
    num_drafts: int = 2
    num_orchestrators: int = 2
    num_gateways: int = 2
    step_ms: float = 12.0
    has_proxies: bool = True
    timing: Timing = Timing()
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
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        while held := [found for member in self.members if (found := await held_by(member))]:
            if loop.time() > end:
                return held
            await asyncio.sleep(0.5)
        return []


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
            f"--{member.role}-address={await _front(stack, member, number, shape)}"
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
            address = await _front(stack, member, 1 + number, shape)
            fronts.append(f"--orchestrator-address={address}")
        for number in range(shape.num_gateways):
            flags = (
                f"--tokenizer={shape.target}",
                *fronts,
                f"--orchestrator-hang-s={shape.timing.hang_s}",
                "--failover-timeout-s=60",
                "--shutdown-grace-s=10",
            )
            cluster.gateways.append(Member(f"gateway-{number}", "gateway", hold_port(), flags))
        for member in cluster.members:
            member.timing = shape.timing
            await member.start()
        await asyncio.gather(*(member.running.wait_ready() for member in cluster.members))
        await _until_known(cluster)
        yield cluster


async def _front(stack: AsyncExitStack, member: Member, number: int, shape: Shape) -> str:
    """Put a proxy before the first two of a kind; returns where the member is to be reached."""
    if not shape.has_proxies or number > 1:
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
        async with open_channel(member.address) as channel, asyncio.timeout(READY_TIMEOUT_S):
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            while True:
                pair = await stub.GetPair(GetPairRequest(), timeout=READY_TIMEOUT_S)
                status = await stub.GetStatus(GetStatusRequest(), timeout=READY_TIMEOUT_S)
                states = [replica.state for replica in status.replicas]
                if pair.ready and pair.speculation_enabled and states == ["connected"] * wanted:
                    break
                await asyncio.sleep(0.05)


def pick(members: Iterable[Member], key: Callable[[Member], float], *, spare: int) -> Member | None:
    """Choose a member that no fault has, the one left alone longest; None to keep `spare` free."""
    free = [member for member in members if not member.is_faulted]
    if len(free) <= spare:
        return None
    return min(free, key=key)
