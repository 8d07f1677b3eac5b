"""An orchestrator's end of one stream of frames: many sessions' calls over one connection.

A call's way: `send` puts it into the outbox, `link_outbox.py` makes one frame of a turn's calls,
`link_stream.py` writes it; its reply comes in by `_take_frame` and wakes its `PendingCall`. A lost
stream reconnects to the same replica first and sends its open calls again, which the replica joins
or answers from its last reply; only when that fails do the calls fail. Knows frames and call ids;
knows nothing of what a call asks for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from specserve.errors import PeerUnavailable
from specserve.model.messages import EngineLoad
from specserve.rpc.channel import open_channel
from specserve.rpc.codec import unpack_load
from specserve.rpc.garbled import TolerantChannel, require_readable
from specserve.rpc.link_kind import LinkKind
from specserve.rpc.link_outbox import LinkOutbox
from specserve.rpc.link_stream import run_stream
from specserve.rpc.pending import PendingCall, PendingCalls
from specserve.rpc.progress import DeviceProgress
from specserve.rpc.tls import MutualTls
from specserve.rpc.v1 import common_pb2

logger = logging.getLogger(__name__)

RECONNECT_TIMEOUT_S = 1.5
"""How long a lost stream may take to come back before its calls fail."""

RETRY_S = 0.1
"""Pause between two attempts to connect."""

CLOSE_S = 0.5
"""How long a closing link may take to write its last releases."""

CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")


class FrameLink(Generic[CallT, ReplyT]):
    """One replica as one orchestrator reaches it."""

    def __init__(
        self,
        kind: LinkKind[CallT, ReplyT],
        address: str,
        *,
        heartbeat_s: float,
        hang_s: float,
        tls: MutualTls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.address = address
        self.model: common_pb2.GetModelResponse | None = None
        """What the replica serves; asked anew after each reconnect."""
        self.load: EngineLoad | None = None
        self.num_sessions_at_load = 0
        """Own sessions when `load` came: it cannot tell of those that were opened since."""
        self.draining = False
        self.connected = False
        self.retired = False
        """The pool no longer lists this replica: no new sessions, closed once it holds none."""
        self.sessions: set[str] = set()
        """Sessions that this orchestrator holds on the replica."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever connected, draining or model changes."""
        self.on_load: Callable[[], None] = lambda: None
        """Called with each load that comes."""
        self._heartbeat_s = heartbeat_s
        self._tls = tls
        self._clock = clock
        self._numbers = itertools.count(1)
        self._pending: PendingCalls[CallT, ReplyT] = PendingCalls(kind.pool, address)
        self._outbox: LinkOutbox[CallT] = LinkOutbox()
        self._progress = DeviceProgress(hang_s, clock)
        self._closing = False
        self._lost_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect, and keep connected until `close`."""
        self._task = asyncio.create_task(self._run(), name=f"link-{self.kind.pool}-{self.address}")

    async def close(self) -> None:
        """Write what releases are due, then drop the connection; calls in flight fail."""
        self._closing = True
        if self._task is not None:
            if self.connected:
                # Half-closing, not cancelling: a cancelled stream takes its last frame with it.
                self._outbox.flush()
                await asyncio.wait((self._task,), timeout=CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._pending.fail_all("the link was closed")

    def open_channel(self) -> grpc.aio.Channel:
        """Open one more connection to the replica, with the certificates as they are now."""
        return open_channel(self.address, self._tls)

    def next_call_id(self) -> int:
        """Give a number for the next call."""
        return next(self._numbers)

    def send(
        self, call: CallT, call_id: int, *, streaming: bool = False
    ) -> PendingCall[CallT, ReplyT]:
        """Put a call into the next frame."""
        if not self._pending:
            self._progress.restart()
        pending: PendingCall[CallT, ReplyT] = PendingCall(call, call_id, streaming=streaming)
        self._pending.add(pending)
        self._outbox.put(call)
        return pending

    def cancel(self, call_id: int) -> None:
        """Give a call up; a reply that comes all the same is dropped."""
        pending = self._pending.drop(call_id)
        # What was never sent need not be given up there.
        if pending is not None and not self._outbox.withdraw(pending.call):
            self._outbox.cancel(call_id)

    def hurry(self, call_id: int) -> None:
        """Ask for a call to be answered with what it has; its reply is still awaited."""
        if call_id in self._pending:
            self._outbox.cancel(call_id)

    def release(self, session_id: str) -> None:
        """Forget a session there. Idempotent; a lost one is released by its lease.

        A frame's releases act before its calls, so a session may be opened anew at once. Give its
        calls in flight up first.
        """
        if session_id in self.sessions:
            self.sessions.discard(session_id)
            self._outbox.release(session_id)

    def condemn(self, session_id: str) -> None:
        """Say that devices die of a session, be it held there or not."""
        self.sessions.discard(session_id)
        self._outbox.release(session_id, is_poison=True)

    @property
    def num_pending(self) -> int:
        """Calls in flight."""
        return len(self._pending)

    @property
    def is_returning(self) -> bool:
        """The stream was lost a moment ago and may come back: calls sent now wait for it."""
        return (
            not self.connected
            and self._lost_at is not None
            and self._clock() - self._lost_at <= RECONNECT_TIMEOUT_S
        )

    async def _run(self) -> None:
        while True:
            try:
                async with self.open_channel() as channel:
                    await self._serve(channel)
            except grpc.aio.AioRpcError as error:
                logger.info(
                    "%s %s: stream ended: %s: %s",
                    self.kind.pool,
                    self.address,
                    error.code().name,
                    error.details(),
                )
            except PeerUnavailable as error:
                logger.warning("%s", error)
            except (asyncio.InvalidStateError, grpc.aio.UsageError, TimeoutError) as error:
                logger.info("%s %s: stream ended: %r", self.kind.pool, self.address, error)
            if self._closing:
                return
            if self.connected:
                self._lost_at = self._clock()
                self._set_connected(False)
                # Only those that the lost stream carried: a later one waits for the next stream.
                self._pending.fail_streaming("connection lost")
            if not self.is_returning:
                self._pending.fail_all("connection lost")
                # Their leases have run out, or soon will.
                self._outbox.forget_releases()
                if self.retired:
                    self.on_change()
            await asyncio.sleep(RETRY_S)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        stub = self.kind.make_stub(TolerantChannel(channel))
        before = self.model
        model = await stub.GetModel(common_pb2.GetModelRequest(), timeout=RECONNECT_TIMEOUT_S)
        require_readable(model, self.kind.pool, self.address)
        self.model = model
        if before is not None and before.replica_id != model.replica_id:
            # Another process: it holds none of our sessions, and may serve another model.
            self.sessions.clear()
            self._outbox.forget_releases()
            self._pending.fail_all("the replica was replaced")
        self._note_load(unpack_load(model.load))
        self.draining = model.draining
        stream = getattr(stub, self.kind.stream_method)()
        # Same epoch, same step: the replica joins the calls that it has already.
        self._outbox.restart(self._pending.calls())
        self._progress.restart()
        self._set_connected(True)
        await run_stream(
            stream,
            next_frame=lambda: self._outbox.next_frame(self.kind.make_frame, self.sessions),
            take=self._take_frame,
            is_over=lambda: self._closing and not self._outbox.is_due,
            beside=self._beat(),
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._outbox.beat()
            if self._pending and self._progress.stands_still:
                logger.warning("%s %s: the device stands still", self.kind.pool, self.address)
                stuck = self.load.stuck if self.load is not None else ()
                self._pending.fail_all("the device stands still", stuck)
                self._set_connected(False)
            if self.retired and not self.sessions:
                self.on_change()

    def _take_frame(self, frame: Any) -> None:
        require_readable(frame, self.kind.pool, self.address)
        for reply in frame.replies:
            self._pending.take(reply)
        if frame.HasField("load"):
            self._take_load(unpack_load(frame.load))
        if frame.HasField("draining") and not self.draining:
            self.draining = True
            self.on_change()

    def _note_load(self, load: EngineLoad) -> None:
        self.load, self.num_sessions_at_load = load, len(self.sessions)
        self.on_load()

    def _take_load(self, load: EngineLoad) -> None:
        self._note_load(load)
        if self._progress.note(load) and not self.connected:
            self._set_connected(True)

    def _set_connected(self, connected: bool) -> None:
        if self.connected != connected:
            self.connected = connected
            self.on_change()
