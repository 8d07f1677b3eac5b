"""The replicas of one kind that an orchestrator knows, and the choice among them.

Knows links and loads; knows no request.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from specserve.errors import ProtocolMismatch
from specserve.orchestrator.candidates import SeenPrefixes, candidate_of
from specserve.orchestrator.routing import Demand, choose
from specserve.rpc.codec import PROTOCOL_VERSION
from specserve.rpc.link import FrameLink
from specserve.rpc.link_kind import LinkKind
from specserve.rpc.protocol import is_spoken
from specserve.rpc.tls import MutualTls
from specserve.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

logger = logging.getLogger(__name__)

ROOM_LOOK_S = 0.05
"""Time between two looks of a preempted session for free blocks."""


CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")

DraftLink = FrameLink[draft_pb2.ProposeCall, draft_pb2.ProposeReply]
TargetLink = FrameLink[target_pb2.VerifyCall, target_pb2.VerifyReply]

DRAFT_KIND: LinkKind[draft_pb2.ProposeCall, draft_pb2.ProposeReply] = LinkKind(
    "draft", draft_pb2_grpc.DraftServiceStub, "Propose", draft_pb2.ProposeFrame
)
TARGET_KIND: LinkKind[target_pb2.VerifyCall, target_pb2.VerifyReply] = LinkKind(
    "target", target_pb2_grpc.TargetServiceStub, "Verify", target_pb2.VerifyFrame
)


class Pool(Generic[CallT, ReplyT]):
    """Links to every known replica of a kind."""

    def __init__(
        self,
        kind: LinkKind[CallT, ReplyT],
        *,
        heartbeat_s: float,
        hang_s: float,
        tls: MutualTls | None = None,
    ) -> None:
        self.kind = kind
        self.links: dict[str, FrameLink[CallT, ReplyT]] = {}
        self.identity = ""
        """What all of them serve, as one word; empty where they need not serve the same."""
        self.newer: Pool[CallT, ReplyT] | None = None
        """What took this pool's place, with another model; None while it is the present one."""
        self.refusals: dict[str, str] = {}
        """replica_id -> why it is not used, although it answers."""
        self.approved: set[str] = set()
        """replica_ids that were compared with the pair and may be used."""
        self.check: Callable[[FrameLink[CallT, ReplyT]], None] = lambda link: None
        """Called when a link changes; for a new replica it leads to `approve` or `refuse`."""
        self.on_load: Callable[[], None] = lambda: None
        """Called when a replica reports its load, and when the set of usable ones changes."""
        self._heartbeat_s = heartbeat_s
        self._hang_s = hang_s
        self._prefixes = SeenPrefixes()
        self._tls = tls
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._older: Pool[CallT, ReplyT] | None = None

    def update(self, addresses: Sequence[str]) -> None:
        """Know exactly these replicas; links to others are closed once they hold no session."""
        for address in addresses:
            if address in self.links:
                self.links[address].retired = False
            else:
                link = FrameLink(
                    self.kind,
                    address,
                    heartbeat_s=self._heartbeat_s,
                    hang_s=self._hang_s,
                    tls=self._tls,
                )
                self._listen_to(link)
                link.on_load = self._load_came
                self.links[address] = link
                link.start()
        for address in set(self.links) - set(addresses):
            self.links[address].retired = True
            self._drop_if_idle(self.links[address])

    def _listen_to(self, link: FrameLink[CallT, ReplyT]) -> None:
        link.on_change = lambda: self._on_change(link)

    def renew(self) -> Pool[CallT, ReplyT]:
        """Let another model take over: return a pool of the same links, none of them approved yet.

        Whoever holds this pool keeps to the replicas that were approved here, and is left with none
        in the end.
        """
        newer = copy.copy(self)
        newer.approved, newer.refusals, newer.identity = set(), {}, ""
        newer._changed = asyncio.Event()
        newer._older = self
        self.newer = newer
        for link in self.links.values():
            newer._listen_to(link)
        self.notify()
        return newer

    def _drop_if_idle(self, link: FrameLink[CallT, ReplyT]) -> None:
        """Close a link that is no longer listed, once its sessions have ended or it is lost."""
        if not link.retired or link.num_pending or (link.connected and link.sessions):
            return
        if self.links.get(link.address) is link and not link.is_returning:
            del self.links[link.address]
            task = asyncio.get_running_loop().create_task(link.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _on_change(self, link: FrameLink[CallT, ReplyT]) -> None:
        self._drop_if_idle(link)
        if link.connected:
            self._refuse_protocol(link)
        self.check(link)
        self.notify()

    def _load_came(self) -> None:
        self.on_load()

    def _refuse_protocol(self, link: FrameLink[CallT, ReplyT]) -> None:
        """Refuse a replica more than one protocol version away."""
        model = link.model
        if model is not None and not is_spoken(model.protocol_version):
            error = ProtocolMismatch(model.replica_id, model.protocol_version, PROTOCOL_VERSION)
            self.refuse(link, str(error))

    def unchecked(self) -> list[FrameLink[CallT, ReplyT]]:
        """List connected links that were neither approved nor refused yet."""
        known = self.approved | self.refusals.keys()
        return [
            link
            for link in self.links.values()
            if link.connected and link.model is not None and link.model.replica_id not in known
        ]

    def approve(self, link: FrameLink[CallT, ReplyT]) -> None:
        """Let a replica be used."""
        self.approved.add(model_of(link).replica_id)
        self._forget_gone()
        self.notify()

    def refuse(self, link: FrameLink[CallT, ReplyT], why: str) -> None:
        """Never use a replica, and say why: to clients too, so that no address may be in it."""
        logger.error("%s %s is not used: %s", self.kind.pool, link.address, why)
        self.approved.discard(model_of(link).replica_id)
        self.refusals[model_of(link).replica_id] = why
        self._forget_gone()
        self.notify()

    def forget_verdicts(self) -> None:
        """Compare every replica anew."""
        self.approved.clear()
        self.refusals.clear()

    def forget_refusals(self) -> None:
        """Compare the refused ones anew, but for those that speak another protocol."""
        self.refusals.clear()
        for link in self.links.values():
            if link.connected:
                self._refuse_protocol(link)

    def _forget_gone(self) -> None:
        """Keep no verdict on a replica that no link leads to any more."""
        present = {link.model.replica_id for link in self.links.values() if link.model}
        self.approved &= present
        self.refusals = {key: why for key, why in self.refusals.items() if key in present}

    def may_use(self, link: FrameLink[CallT, ReplyT]) -> bool:
        """Say whether a link is connected to a replica that was found to fit the pair."""
        model = link.model
        return link.connected and model is not None and model.replica_id in self.approved

    def notify(self) -> None:
        """Wake everybody who waits for a replica."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_load()
        if self._older is not None:
            self._older.notify()

    def usable(self) -> list[FrameLink[CallT, ReplyT]]:
        """List the links that may open sessions now."""
        return [
            link
            for link in list(self.links.values())  # metrics are read in another thread
            if self.may_use(link) and not link.draining and not link.retired
        ]

    @property
    def mean_sessions(self) -> float:
        """Sessions on a usable replica, the mean, as they report it; 0 without any."""
        held = [link.load.num_sessions if link.load else 0 for link in self.usable()]
        return sum(held) / len(held) if held else 0.0

    @property
    def block_size(self) -> int:
        """Tokens per KV block of the usable replicas, the smallest; 0 while none has blocks."""
        sizes = [link.model.block_size for link in self.usable() if link.model]
        return min(filter(None, sizes), default=0)

    def condemn(self, session_id: str) -> None:
        """Tell every replica that devices die of a session."""
        for link in self.links.values():
            link.condemn(session_id)

    def choose(
        self, demand: Demand, avoid: Collection[str] = (), *, must_fit: bool = False
    ) -> FrameLink[CallT, ReplyT] | None:
        """Choose a usable replica for a session; an `avoid`ed one only when there is no other.

        Args:
            must_fit: choose none rather than one without free KV blocks.
        """
        links = self.usable()
        preferred = [link for link in links if link.address not in avoid] or links
        address = choose(
            [candidate_of(link, demand.num_tokens) for link in preferred],
            demand,
            is_known=self._prefixes.note(demand.prefix_key),
            must_fit=must_fit,
        )
        return None if address is None else self.links[address]

    def successor(
        self, link: FrameLink[CallT, ReplyT], demand: Demand
    ) -> FrameLink[CallT, ReplyT] | None:
        """Choose where a session goes from a replica that drains; None when it stays there."""
        return self.choose(demand) if link.draining else None

    async def wait_for_one(
        self, timeout_s: float, demand: Demand, avoid: Collection[str] = ()
    ) -> FrameLink[CallT, ReplyT] | None:
        """Wait until a replica can be chosen; None when the time is over, or a newer pool is in."""
        await self.wait_usable(timeout_s)
        return self.choose(demand, avoid)

    def has_room(self, demand: Demand, priority: int) -> bool:
        """Say whether a session can have its KV blocks somewhere, at a less urgent one's cost too.

        Without any usable replica there is nothing to wait for here: whoever asks one will wait.
        """
        links = self.usable()
        return not links or any(
            candidate_of(link, demand.num_tokens).has_room
            or (link.load is not None and link.load.least_priority < priority)
            for link in links
        )

    async def wait_for_room(self, demand: Demand, priority: int, timeout_s: float) -> None:
        """Wait until a session can have its KV blocks somewhere, or the time is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not self.has_room(demand, priority) and loop.time() < end:  # noqa: ASYNC110 - rare
            await asyncio.sleep(ROOM_LOOK_S)

    async def wait_usable(self, timeout_s: float) -> bool:
        """Wait until some replica may open sessions; False when the time is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not self.usable():
            left = end - loop.time()
            if left <= 0 or self.newer is not None:
                return False
            changed = self._changed
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                return False
        return True

    async def close(self) -> None:
        """Drop every link."""
        await asyncio.gather(*(link.close() for link in self.links.values()), *self._closing)


def model_of(link: FrameLink[CallT, ReplyT]) -> common_pb2.GetModelResponse:
    """Give what a connected link's replica serves."""
    if link.model is None:
        raise RuntimeError("a link that never connected was chosen")
    return link.model
