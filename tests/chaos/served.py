"""The same under Ray Serve: replicas, Serve's proxy and its controller are killed in turn.

Serve's controller restarts what dies; nothing here does. Knows process names of Ray; knows no plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos.client import Client, toy_truth
from chaos.cluster import DRAFT, TARGET, VOCAB_SIZE
from chaos.members import Member, held_by
from chaos.stage import load, requests_from
from chaos.tally import Harm, Tally
from chaos.workload import make_request
from helpers.processes import CommandLine
from helpers.waiting import eventually
from specserve.tools.held_port import HeldPort

START_TIMEOUT_S = 300
MEND_TIMEOUT_S = 180.0
NUM_REPLICAS = {"target": 2, "draft": 1, "orchestrator": 2, "gateway": 2}
PAUSE_S = 4.0
"""Between one fault mended and the next."""
LEAK_WAIT_S = 60.0
"""Longer than any lease, and than a replica takes to start."""


class ServedCluster:
    """A running `specserve serve`, and its processes by what they do."""

    def __init__(self, command: CommandLine, ports: dict[str, int], url: str) -> None:
        self._command = command
        self._ports = ports
        self.url = url

    def members(self) -> list[Member]:
        """Return the replicas that listen, by the port that each has: it counts up by rank."""
        found = []
        for role, first in self._ports.items():
            for pid in self.pids(role):
                with contextlib.suppress(psutil.Error):
                    for connection in psutil.Process(pid).net_connections("tcp"):
                        port = connection.laddr.port
                        if connection.status == psutil.CONN_LISTEN and 0 <= port - first < 8:
                            found.append(Member(f"{role}-{port - first}", role, port, ()))
        return found

    def pids(self, what: str) -> list[int]:
        """Return the processes of a role, `proxy` or `controller`."""
        words = {"proxy": "ray::ProxyActor", "controller": "ray::ServeController"}
        word = words.get(what, f"ray::ServeReplica:specserve:{what}")
        found = []
        for process in self._command.descendants():
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(word):
                    found.append(process.pid)
        return found

    def devices(self, role: str) -> list[int]:
        """Return the device processes of a role's replicas."""
        found = []
        for pid in self.pids(role):
            with contextlib.suppress(psutil.Error):
                found += [child.pid for child in psutil.Process(pid).children()]
        return found

    async def leaks(self) -> list[str]:
        """Wait until no service holds anything; returns what is still held when time is over."""
        held: list[str] = []

        async def look() -> bool:
            members = self.members()
            held[:] = [found for member in members if (found := await held_by(member))]
            if len(members) < sum(NUM_REPLICAS[role] for role in self._ports):
                held.append(f"only {[member.name for member in members]} listen")
            return not held

        with contextlib.suppress(AssertionError):
            await eventually(look, "nothing is held", LEAK_WAIT_S, every_s=0.5)
        return held


Harmful = Callable[[ServedCluster, random.Random], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ServeFault:
    """One kind."""

    kind: str
    harm: Harmful
    weight: int = 1


def _kill(what: str) -> Harmful:
    async def harm(cluster: ServedCluster, chance: random.Random) -> None:
        before = cluster.pids(what)
        victim = chance.choice(before)
        os.kill(victim, signal.SIGKILL)
        await eventually(
            lambda: len(set(cluster.pids(what)) - {victim}) >= len(before),
            f"{what} is there again",
            within_s=MEND_TIMEOUT_S,
        )

    return harm


def _kill_device(role: str) -> Harmful:
    async def harm(cluster: ServedCluster, chance: random.Random) -> None:
        before = cluster.devices(role)
        victim = chance.choice(before)
        os.kill(victim, signal.SIGKILL)
        await eventually(
            lambda: len(set(cluster.devices(role)) - {victim}) >= len(before),
            f"{role} has a device again",
            within_s=MEND_TIMEOUT_S,
        )

    return harm


def _hang(what: str, seconds: float) -> Harmful:
    async def harm(cluster: ServedCluster, chance: random.Random) -> None:
        victim = chance.choice(cluster.pids(what))
        os.kill(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(victim, signal.SIGCONT)

    return harm


SERVE_FAULTS = (
    ServeFault("Serve controller killed", _kill("controller")),
    ServeFault("Serve proxy killed", _kill("proxy")),
    ServeFault("target replica killed", _kill("target")),
    ServeFault("draft replica killed", _kill("draft")),
    ServeFault("orchestrator replica killed", _kill("orchestrator")),
    ServeFault("gateway replica killed", _kill("gateway")),
    ServeFault("target device killed", _kill_device("target")),
    ServeFault("target replica hangs", _hang("target", 8.0)),
    ServeFault("orchestrator replica hangs", _hang("orchestrator", 8.0)),
    ServeFault("draft replica hangs", _hang("draft", 8.0)),
)


@asynccontextmanager
async def served_cluster() -> AsyncIterator[ServedCluster]:
    """Start Serve and the application on it, and stop both."""
    async with AsyncExitStack() as stack:

        def hold_row(count: int) -> int:
            """Hold so many ports in a row, for replicas count theirs up; return the first."""
            while True:
                first = HeldPort()
                stack.callback(first.release)
                if all(_hold(stack, first.number + more) for more in range(1, count)):
                    return first.number

        ports = {role: hold_row(NUM_REPLICAS[role]) for role in ("target", "draft", "orchestrator")}
        front = hold_row(1)
        settings = {
            "target": {"model": f"{TARGET},step_ms=8", "device": "cpu", "num_kv_blocks": 2048},
            "speculative": {"model": f"{DRAFT},step_ms=1"},
            "server": {"lease_s": 8.0, "drain_deadline_s": 10.0},
            "orchestrator": {"device_hang_s": 5.0, "heartbeat_s": 1.0, "reopen_timeout_s": 110.0},
            "gateway": {"port": front, "failover_timeout_s": 110.0},
            **{f"{role}_port": port for role, port in ports.items()},
            **{f"{role}_pool": {"num_replicas": count} for role, count in NUM_REPLICAS.items()},
        }
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(directory) / "specserve.yaml"
        path.write_text(json.dumps(settings))  # JSON is YAML
        command = await asyncio.to_thread(CommandLine, ["serve", f"--config={path}"])
        stack.callback(command.kill)
        ready = await asyncio.to_thread(command.wait_event, "ready", START_TIMEOUT_S)
        yield ServedCluster(command, ports, str(ready["address"]))


def _hold(stack: AsyncExitStack, port: int) -> bool:
    """Hold a port as `HeldPort` does; False where another has it."""
    chosen = stack.enter_context(socket.socket())
    try:
        chosen.bind(("127.0.0.1", port))
    except OSError:
        return False
    chosen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return True


async def run_served(
    cluster: ServedCluster, faults: Iterator[ServeFault], tally: Tally, seed: int, per_s: float
) -> None:
    """Do every fault once under load, then look for what is left."""
    chance = random.Random(seed)
    client = Client(lambda: [cluster.url], toy_truth(TARGET), may_retry_answers=True)
    loop = asyncio.get_running_loop()

    async def break_things() -> None:
        for fault in faults:
            await asyncio.sleep(PAUSE_S)
            harm = Harm(fault.kind, loop.time())
            tally.harms.append(harm)
            try:
                await fault.harm(cluster, chance)
            except (AssertionError, IndexError, ProcessLookupError) as error:
                tally.troubles.append(f"{fault.kind}: {error!r}")
            harm.ended = loop.time()

    try:
        async with asyncio.TaskGroup() as group:
            breaking = group.create_task(break_things())
            group.create_task(
                load(
                    client,
                    requests_from(lambda c: make_request(c, VOCAB_SIZE), random.Random(seed + 1)),
                    tally,
                    until=lambda: (
                        breaking.done() and tally.num_requests >= tally.num_requests_wanted
                    ),
                    per_s=per_s,
                )
            )
    finally:
        await client.close()
    tally.leaks += await cluster.leaks()
