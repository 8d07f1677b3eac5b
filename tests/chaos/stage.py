"""One stage: load on a cluster of processes, faults beside it, then what is left behind.

Knows how load and faults go together; knows no particular fault.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence

from chaos.client import Client
from chaos.cluster import Cluster
from chaos.faults import Fault, MissedError
from chaos.members import Member
from chaos.tally import Harm, Tally
from chaos.workload import Request

logger = logging.getLogger(__name__)

NUM_CLIENTS = 32
NUM_FAULTS_AT_ONCE = 5
"""Most of them wait for a process to start, which takes long on a busy machine."""
SPARE = {"target": 1, "orchestrator": 1, "gateway": 1, "draft": 0}
"""Members of a role that no fault may have: a request needs one of each, but no draft."""
MAX_LONGER = 2.0
LEAK_WAIT_S = 30.0
"""Longer than any lease."""


async def load(
    client: Client,
    requests: Iterator[Request],
    tally: Tally,
    *,
    until: Callable[[], bool],
    per_s: float,
) -> None:
    """Send requests, so many a second, until it is time to stop; then let the last ones end."""
    slots = asyncio.Semaphore(NUM_CLIENTS)
    loop = asyncio.get_running_loop()

    async def one(request: Request) -> None:
        try:
            tally.add(await client.run(request))
        finally:
            slots.release()

    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in itertools.count():
            await asyncio.sleep(began + number / per_s - loop.time())
            await slots.acquire()
            if until():
                slots.release()
                break
            group.create_task(one(next(requests)))


class Breaker:
    """Does faults to a cluster, a few at a time, and never to the last member of a role."""

    def __init__(self, cluster: Cluster, tally: Tally, chance: random.Random) -> None:
        self._cluster = cluster
        self._tally = tally
        self._chance = chance
        self._mended = asyncio.Event()

    async def run(
        self, faults: Iterator[Fault], *, until: Callable[[], bool], pause_s: float
    ) -> None:
        """Begin a fault every `pause_s` seconds on average, until it is time to stop."""
        async with asyncio.TaskGroup() as group:
            running: set[asyncio.Task[None]] = set()
            for fault in faults:
                await asyncio.sleep(pause_s * (0.5 + self._chance.random()))
                member = None
                while not until():
                    if len(running) < NUM_FAULTS_AT_ONCE:
                        member = self._victim(fault)
                        if member is not None:
                            break
                    if not running:
                        raise ValueError(f"{fault.kind}: this cluster has no {fault.role} for it")
                    self._mended.clear()
                    await self._mended.wait()
                if member is None:
                    break
                task = group.create_task(self.do(fault, member))
                running.add(task)
                task.add_done_callback(running.discard)
                await self.revive()

    def _victim(self, fault: Fault) -> Member | None:
        """Choose the member that was left alone longest; None while all are needed or in use."""
        free = [member for member in self._cluster.of(fault.role) if not member.is_faulted]
        if len(free) <= (0 if fault.leaves_it else SPARE[fault.role]):
            return None
        fitting = [m for m in free if not fault.through or getattr(m, fault.through) is not None]
        return min(fitting, key=lambda member: member.faulted_at, default=None)

    async def revive(self) -> None:
        """Start anew what has ended by itself: that is a fault found."""
        for name in await self._cluster.revive():
            self._tally.troubles.append(f"{name} ended by itself")

    async def do(self, fault: Fault, member: Member) -> None:
        """Harm one member and mend it."""
        loop = asyncio.get_running_loop()
        member.is_faulted, member.faulted_at = True, loop.time()
        harm = Harm(fault.kind, loop.time())
        self._tally.harms.append(harm)
        logger.info("%s: %s", fault.kind, member.name)
        try:
            await fault.harm(member, self._chance)
            harm.ended = loop.time()
        except MissedError as error:
            self._tally.harms.remove(harm)
            self._tally.missed[fault.kind] += 1
            logger.info("missed: %s", error)
        except Exception as error:
            self._tally.troubles.append(f"{fault.kind}: {error!r}")
            logger.exception("%s: %s", fault.kind, member.name)
        finally:
            member.is_faulted = False
            self._mended.set()


async def run_stage(
    cluster: Cluster,
    client: Client,
    requests: Iterator[Request],
    faults: Iterator[Fault],
    tally: Tally,
    *,
    seconds: float,
    per_s: float,
    pause_s: float,
    chance: random.Random,
) -> None:
    """Load and break a cluster for so long, then look for what is left in it.

    A busy machine takes longer to do as much as was asked for: up to MAX_LONGER times as long.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()

    def is_over() -> bool:
        passed_s = loop.time() - began
        return passed_s > (seconds if tally.is_enough else MAX_LONGER * seconds)

    breaker = Breaker(cluster, tally, chance)
    async with asyncio.TaskGroup() as group:
        breaking = group.create_task(breaker.run(faults, until=is_over, pause_s=pause_s))
        # Load goes on until the last fault is mended.
        group.create_task(load(client, requests, tally, until=breaking.done, per_s=per_s))
    await breaker.revive()
    tally.leaks += await cluster.leaks(LEAK_WAIT_S)


def requests_from(
    make: Callable[[random.Random], Request], chance: random.Random
) -> Iterator[Request]:
    """Give requests without end."""
    while True:
        yield make(chance)


def named(faults: Sequence[Fault], kinds: Sequence[str]) -> list[Fault]:
    """Find faults by kind, in the order given."""
    by_kind = {fault.kind: fault for fault in faults}
    return [by_kind[kind] for kind in kinds]
