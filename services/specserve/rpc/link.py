"""An orchestrator's end of one stream of frames: many sessions' calls over one connection.

The link writes once per event-loop turn. A lost stream reconnects to the same replica first and
sends its open calls again, which the replica joins or answers from its last reply; only when that
fails do the calls fail. Knows frames and call ids; knows nothing of what a call asks for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from specserve.errors import PeerUnavailable
from specserve.model.messages import EngineLoad
from specserve.rpc.channel import MAX_FRAME_ITEMS, open_channel
from specserve.rpc.codec import unpack_load
from specserve.rpc.pending import PendingCall
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


class FrameStub(Protocol):
    """The generated stub of a draft or target, as far as a link needs it."""

    GetModel: Any


class LinkKind(Generic[CallT, ReplyT]):
    """What tells a draft link from a target link."""

    def __init__(
        self,
        pool: str,
        make_stub: Callable[[grpc.aio.Channel], FrameStub],
        stream_method: str,
        make_frame: Callable[..., Any],
    ) -> None:
        self.pool = pool
        """draft or target, for messages and metrics."""
        self.make_stub = make_stub
        self.stream_method = stream_method
        self.make_frame = make_frame


class FrameLink(Generic[CallT, ReplyT]):
    """One replica as one orchestrator reaches it."""

    def __init__(
        self,
        kind: LinkKind[CallT, ReplyT],
        address: str,
        *,
        heartbeat_s: float,
        hang_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.address = address
        self.model: common_pb2.GetModelResponse | None = None
        """What the replica serves; asked anew after each reconnect."""
        self.load: EngineLoad | None = None
        self.draining = False
        self.connected = False
        self.retired = False
        """The pool no longer lists this replica: no new sessions, closed once it holds none."""
        self.sessions: set[str] = set()
        """Sessions that this orchestrator holds on the replica."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever connected, draining or model changes."""
        self._heartbeat_s = heartbeat_s
        self._hang_s = hang_s
        self._clock = clock
        self._numbers = itertools.count(1)
        self._pending: dict[int, PendingCall[CallT, ReplyT]] = {}
        self._calls: list[CallT] = []
        self._cancels: list[common_pb2.Cancel] = []
        self._releases: list[common_pb2.Release] = []
        self._heartbeat_due = False
        self._outbox = asyncio.Event()
        self._closing = False
        self._lost_at: float | None = None
        self._moved_at = clock()
        self._num_iterations = -1
        self._stream: Any = None
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
                self._outbox.set()
                await asyncio.wait((self._task,), timeout=CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all("the link was closed")

    def next_call_id(self) -> int:
        """Give a number for the next call."""
        return next(self._numbers)

    def send(
        self, call: CallT, call_id: int, *, streaming: bool = False
    ) -> PendingCall[CallT, ReplyT]:
        """Put a call into the next frame."""
        pending: PendingCall[CallT, ReplyT] = PendingCall(call, call_id, streaming=streaming)
        if not self._pending:
            self._moved_at = self._clock()
        self._pending[call_id] = pending
        self._calls.append(call)
        self._outbox.set()
        return pending

    def cancel(self, call_id: int) -> None:
        """Give a call up; a reply that comes all the same is dropped."""
        pending = self._pending.pop(call_id, None)
        if pending is None:
            return
        unsent = [call for call in self._calls if call is not pending.call]
        if len(unsent) < len(self._calls):
            self._calls = unsent  # never sent: there is nothing to give up
        else:
            self._cancels.append(common_pb2.Cancel(call_id=call_id))
            self._outbox.set()

    def hurry(self, call_id: int) -> None:
        """Ask for a call to be answered with what it has; its reply is still awaited."""
        if call_id in self._pending:
            self._cancels.append(common_pb2.Cancel(call_id=call_id))
            self._outbox.set()

    def release(self, session_id: str) -> None:
        """Forget a session there. Idempotent; a lost one is released by its lease.

        A frame's releases act before its calls, so a session may be opened anew at once. Give its
        calls in flight up first.
        """
        if session_id in self.sessions:
            self.sessions.discard(session_id)
            self._releases.append(common_pb2.Release(session_id=session_id))
            self._outbox.set()

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
                async with open_channel(self.address) as channel:
                    await self._serve(channel)
            except grpc.aio.AioRpcError as error:
                logger.info(
                    "%s %s: stream ended: %s", self.kind.pool, self.address, error.code().name
                )
            except (asyncio.InvalidStateError, grpc.aio.UsageError, TimeoutError) as error:
                logger.info("%s %s: stream ended: %r", self.kind.pool, self.address, error)
            if self._closing:
                return
            if self.connected:
                self._lost_at = self._clock()
                self._set_connected(False)
                # Only those that the lost stream carried: a later one waits for the next stream.
                self._fail_streaming()
            if not self.is_returning:
                self._fail_all("connection lost")
                # Their leases have run out, or soon will.
                self._releases.clear()
                if self.retired:
                    self.on_change()
            await asyncio.sleep(RETRY_S)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        stub = self.kind.make_stub(channel)
        before = self.model
        self.model = await stub.GetModel(common_pb2.GetModelRequest(), timeout=RECONNECT_TIMEOUT_S)
        if before is not None and before.replica_id != self.model.replica_id:
            # Another process: it holds none of our sessions, and may serve another model.
            self.sessions.clear()
            self._releases.clear()
            self._fail_all("the replica was replaced")
        self.load = unpack_load(self.model.load)
        self.draining = self.model.draining
        self._stream = getattr(stub, self.kind.stream_method)()
        self._resend()
        self._moved_at = self._clock()
        self._set_connected(True)
        writer = asyncio.create_task(self._write(self._stream))
        beat = asyncio.create_task(self._beat())
        try:
            await self._read(self._stream)
        finally:
            # An abandoned aio call is never collected: cancel it by name.
            self._stream.cancel()
            for task in (writer, beat):
                task.cancel()
            await asyncio.gather(writer, beat, return_exceptions=True)

    def _resend(self) -> None:
        """Send open calls again after a reconnect: same epoch, same step, so they are joined."""
        self._calls = [pending.call for pending in self._pending.values()]
        self._cancels = []
        self._outbox.set()

    async def _write(self, stream: Any) -> None:
        while True:
            await self._outbox.wait()
            self._outbox.clear()
            heartbeat = None
            if self._heartbeat_due:
                self._heartbeat_due = False
                heartbeat = common_pb2.Heartbeat(session_ids=self.sessions)
            # A burst of long prompts must not add up to a frame that the peer refuses.
            calls, self._calls = self._calls[:MAX_FRAME_ITEMS], self._calls[MAX_FRAME_ITEMS:]
            if self._calls:
                self._outbox.set()
            frame = self.kind.make_frame(
                calls=calls,
                cancels=self._cancels,
                releases=self._releases,
                heartbeat=heartbeat,
            )
            self._cancels, self._releases = [], []
            await stream.write(frame)
            if self._closing and not self._outbox.is_set():
                await stream.done_writing()
                return

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._heartbeat_due = True
            self._outbox.set()
            if self._pending and self._clock() - self._moved_at > self._hang_s:
                logger.warning("%s %s: the device stands still", self.kind.pool, self.address)
                self._fail_all("the device stands still")
                self._set_connected(False)
            if self.retired and not self.sessions:
                self.on_change()

    async def _read(self, stream: Any) -> None:
        while True:
            frame = await stream.read()
            if frame is grpc.aio.EOF:
                await stream.code()
                return
            for reply in frame.replies:
                self._take(reply)
            if frame.HasField("load"):
                self._take_load(unpack_load(frame.load))
            if frame.HasField("draining") and not self.draining:
                self.draining = True
                self.on_change()

    def _take(self, reply: Any) -> None:
        pending = self._pending.get(reply.call_id)
        if pending is None:
            return
        last = not getattr(reply, "more_follows", False)
        if last:
            del self._pending[reply.call_id]
        pending.put(reply, last=last)

    def _take_load(self, load: EngineLoad) -> None:
        self.load = load
        if load.num_iterations != self._num_iterations:
            self._num_iterations = load.num_iterations
            self._moved_at = self._clock()
            if not self.connected:
                self._set_connected(True)

    def _set_connected(self, connected: bool) -> None:
        if self.connected != connected:
            self.connected = connected
            self.on_change()

    def _fail_streaming(self) -> None:
        """Decode-ahead is not replayed: its caller goes on from what it has committed."""
        self._fail(p for p in self._pending.values() if p.streaming)

    def _fail_all(self, why: str) -> None:
        self._fail(self._pending.values(), why)

    def _fail(
        self, calls: Iterable[PendingCall[CallT, ReplyT]], why: str = "connection lost"
    ) -> None:
        for pending in list(calls):
            self._pending.pop(pending.call_id, None)
            pending.fail(PeerUnavailable(self.kind.pool, f"{self.address}: {why}"))
