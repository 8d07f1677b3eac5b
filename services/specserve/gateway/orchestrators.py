"""The orchestrators that a gateway knows, and which of them to ask.

Knows addresses, channels and how many calls run on each; knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from specserve.errors import PeerUnavailable
from specserve.gateway.liveness import HANG_S, Liveness
from specserve.rpc.channel import open_channel
from specserve.rpc.tls import MutualTls
from specserve.rpc.v1.generation_pb2_grpc import GenerationServiceStub
from specserve.rpc.v1.requests_pb2_grpc import RecentRequestsServiceStub

logger = logging.getLogger(__name__)

AVOID_S = 1.0
"""How long an orchestrator that failed is asked last, in seconds."""


class Orchestrator:
    """One orchestrator, and the calls of this gateway that run on it."""

    def __init__(
        self, address: str, hang_s: float, tls: MutualTls | None = None, generation: int = 0
    ) -> None:
        self.address = address
        self.generation = generation
        """Of the certificates that it is dialled with."""
        self.avoid_until = 0.0
        """Event-loop time before which others are preferred."""
        self.channel: grpc.aio.Channel = open_channel(address, tls)
        self.stub = GenerationServiceStub(self.channel)
        self.recent = RecentRequestsServiceStub(self.channel)
        self._calls: set[Any] = set()
        self._liveness = Liveness(self.channel, hang_s, self._give_up)

    @property
    def num_running(self) -> int:
        """Calls of this gateway in flight."""
        return len(self._calls)

    @property
    def is_hung(self) -> bool:
        """True from when it was found to be silent until it answers again."""
        return self._liveness.is_hung

    @contextmanager
    def running(self, call: Any) -> Iterator[None]:
        """Count a call while it runs, and cancel it if the orchestrator hangs."""
        self._calls.add(call)
        self._liveness.watch()
        try:
            yield
        finally:
            self._calls.discard(call)
            # However it is left: an abandoned call would hold both KV caches.
            call.cancel()
            if not self._calls:
                self._liveness.rest()

    def heard(self) -> None:
        """Note that it has said something."""
        self._liveness.heard()

    def _give_up(self) -> None:
        if self._calls:
            logger.warning("orchestrator %s does not answer: its streams move on", self.address)
        for call in self._calls:
            call.cancel()

    async def close(self) -> None:
        """Close the connection."""
        await self._liveness.close()
        await self.channel.close()


class OrchestratorPool:
    """All orchestrators known; their channels belong to the event loop that first used them."""

    def __init__(
        self, addresses: Iterable[str], tls: MutualTls | None = None, hang_s: float = HANG_S
    ) -> None:
        self._addresses = tuple(addresses)
        self._tls = tls
        self._hang_s = hang_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._members: dict[str, Orchestrator] = {}  # {address: orchestrator}

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each, as last told."""
        return self._addresses

    async def set_addresses(self, addresses: Iterable[str]) -> None:
        """Learn who is there now; calls that run on one that is gone go on while it answers."""
        self._addresses = tuple(addresses)
        idle = [
            address
            for address, member in self._members.items()
            if address not in self._addresses and member.num_running == 0
        ]
        for address in idle:
            await self._members.pop(address).close()

    def members(self) -> Sequence[Orchestrator]:
        """Return all of them, connected on demand."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Another loop's channels cannot be used, nor closed, from this one.
            self._loop, self._members = loop, {}
        generation = 0 if self._tls is None else self._tls.generation()
        for address in self._addresses:
            member = self._members.get(address)
            if member is None or member.generation != generation:
                # One that is replaced lives on, connection and all, while a call runs on it.
                self._members[address] = Orchestrator(address, self._hang_s, self._tls, generation)
        return [self._members[address] for address in self._addresses]

    def choose(self) -> Orchestrator:
        """Return the one with the fewest calls among those that did not just fail.

        Raises:
            PeerUnavailable: none is known.
        """
        members = self.members()
        if not members:
            raise PeerUnavailable("orchestrator", "none is known")
        now = asyncio.get_running_loop().time()
        return min(
            members,
            # Ties by chance, or every gateway would start with the same one.
            key=lambda m: (m.is_hung, now < m.avoid_until, m.num_running, random.random()),
        )

    def avoid(self, member: Orchestrator) -> None:
        """Ask this one last for a while."""
        member.avoid_until = asyncio.get_running_loop().time() + AVOID_S

    async def close(self) -> None:
        """Close all channels."""
        members, self._members = self._members, {}
        for member in members.values():
            await member.close()
