"""What Ray Serve asks of a replica, answered by the running service inside it.

The four deployments share these hooks. Knows the names that Serve calls; imports no Ray, so that
it can be tested, and used as a plain object, without a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from specserve.errors import PeerUnavailable
from specserve.rpc.server import RunningService

logger = logging.getLogger(__name__)

DISCOVERY_PERIOD_S = 2.0
"""Time between two looks at which replicas a pool has."""

DISCOVERY_TIMEOUT_S = 5.0
"""A replica that does not say its address within this time is asked again next time."""


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """Where one replica's gRPC server is."""

    role: str
    """draft, target or orchestrator."""
    address: str
    """host:port."""
    replica_id: str
    pid: int


class ServiceReplica:
    """A Serve replica around one running service: set `role`, then `run_service` in __init__."""

    role: str

    def run_service(self, service: RunningService, drain_deadline_s: float) -> None:
        """Keep the started service that the hooks below speak for."""
        self._service = service
        self._drain_deadline_s = drain_deadline_s

    async def address(self) -> str:
        """Return host:port, for discovery by broadcast."""
        return self._service.address

    async def describe(self) -> ReplicaDescription:
        """Return who and where this replica is, for people."""
        return ReplicaDescription(
            self.role, self._service.address, self._service.replica_id, os.getpid()
        )

    def record_replica_metadata(self) -> dict[str, str | int]:
        """Publish the address with the replica; Serve asks once, after __init__."""
        return {
            "role": self.role,
            "grpc_address": self._service.address,
            "replica_id": self._service.replica_id,
            "pid": os.getpid(),
        }

    async def check_health(self) -> None:
        """Raise when the service can no longer serve; Serve then replaces the replica."""
        failure = self._service.failure()
        if failure is not None:
            raise PeerUnavailable(self.role, failure)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Give the load that scaling policies read."""
        return self._service.stats()

    async def drain_and_stop(self) -> None:
        """Give live sessions their time to finish or move, then end; nothing if never started.

        For an `async def __del__`, which Serve awaits before it ends a replica: it does not count
        our own gRPC streams as ongoing requests.
        """
        service: RunningService | None = getattr(self, "_service", None)
        if service is not None:
            await service.drain(self._drain_deadline_s)
            await service.stop()


@dataclass(frozen=True, slots=True)
class PoolView:
    """What one look at a pool saw."""

    addresses: tuple[str, ...]
    """host:port of every replica that answered."""
    is_complete: bool
    """False when some replica did not answer: one not seen may still be there."""


class PoolWatcher:
    """Keeps the addresses of one pool, by asking for them every few seconds.

    Knows nothing of who is asked: `look` is the deployments' broadcast, or a test's function.
    """

    def __init__(self, pool: str, look: Callable[[], Awaitable[PoolView]]) -> None:
        self.pool = pool
        self.addresses: tuple[str, ...] = ()
        self._look = look
        self._lost = False

    async def refresh(self) -> bool:
        """Look once; return whether the addresses changed.

        A look that failed, or that a replica did not answer, forgets no address: a busy
        replica must not lose its sessions because it was slow to say where it is.
        """
        try:
            view = await self._look()
        except Exception as error:  # noqa: BLE001 - Ray has many kinds; all mean "ask later"
            if self.addresses and not self._lost:
                logger.warning("no replica of %s found: %s", self.pool, error)
            self._lost = True
            return False
        self._lost = False
        addresses = set(view.addresses)
        if not view.is_complete:
            addresses |= set(self.addresses)
        changed = tuple(sorted(addresses)) != self.addresses
        self.addresses = tuple(sorted(addresses))
        return changed


async def watch_pools(
    watchers: Sequence[PoolWatcher], on_change: Callable[[], Awaitable[None]], period_s: float
) -> None:
    """Refresh all watchers every `period_s` until cancelled; call `on_change` after a change."""
    while True:
        changes = await asyncio.gather(*(watcher.refresh() for watcher in watchers))
        if any(changes):
            await on_change()
        # The first replicas are waited for by people: look often until every pool has one.
        is_complete = all(watcher.addresses for watcher in watchers)
        await asyncio.sleep(period_s if is_complete else period_s / 8)


def view_of(answers: Sequence[object]) -> PoolView:
    """Sort a broadcast's answers into addresses and failures."""
    addresses = tuple(answer for answer in answers if isinstance(answer, str))
    return PoolView(addresses, is_complete=len(addresses) == len(answers))
