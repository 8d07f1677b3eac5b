"""One replica as its callers see it: frames in, calls to the device, replies to those who asked.

A frame's way: `serve` reads it, `_take_frame` sorts it, `_take_call` gives each call to the device
(`model/device.py`), `_on_output` puts each reply on the stream it belongs to (`frame_stream.py`).
Knows no proposal and no verification: a `Wire` translates those.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from specserve.errors import (
    DeviceDied,
    Draining,
    PeerUnavailable,
    SessionNotFound,
    SpecServeError,
)
from specserve.model.device import Device
from specserve.model.messages import CallFailed, Cancel, EngineLoad, EngineOutput, Release, Reply
from specserve.rpc import codec
from specserve.rpc.call_span import start_call_span
from specserve.rpc.call_table import CallInFlight, CallTable
from specserve.rpc.device_supervisor import DeviceSupervisor
from specserve.rpc.frame_stream import FrameStream
from specserve.rpc.leases import Leases
from specserve.rpc.wire import Wire
from specserve.telemetry import Tracing

logger = logging.getLogger(__name__)


class ReplicaServer:
    """Sessions, leases and calls in flight of one replica; one event loop, one device."""

    def __init__(
        self,
        replica_id: str,
        wire: Wire,
        start_device: Callable[[], Awaitable[Device]],
        lease_s: float,
        device_restart_s: float,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
    ) -> None:
        self.replica_id = replica_id
        self._drain_end: float | None = None
        """When this replica stops, by `clock`; None while it does not drain."""
        self._wire = wire
        self._clock = clock
        self._calls = CallTable()
        self._supervisor = DeviceSupervisor(
            replica_id,
            start_device,
            on_output=self._on_output,
            on_death=self._on_death,
            is_working=lambda: bool(self._calls),
            restart_s=device_restart_s,
            clock=clock,
        )
        self._leases = Leases(lease_s, clock)
        self._streams: set[FrameStream] = set()
        self._suspects: dict[str, int] = {}
        """Sessions that the device computed when it died, and nobody waited for: what to tell them.
        """
        self._num_held = 0
        """Sessions on the device by its last output."""
        self._stopping = asyncio.Event()
        self._tracing = tracing or Tracing()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the device; raises what its start-up raised."""
        await self._supervisor.start()
        self._tasks = [
            asyncio.create_task(self._sweep(), name=f"leases-{self.replica_id}"),
            asyncio.create_task(self._supervisor.watch(), name=f"device-{self.replica_id}"),
        ]

    @property
    def device(self) -> Device:
        """The running device."""
        return self._supervisor.device

    @property
    def load(self) -> EngineLoad:
        """The device's load, with what this server knows sooner: sessions, and who calls."""
        return replace(
            self.device.load,
            num_sessions=self.num_sessions,
            num_callers=len(self._streams),
            stuck=tuple(self._supervisor.stuck),
        )

    @property
    def draining(self) -> bool:
        """Say whether this replica was told to stop."""
        return self._drain_end is not None

    @property
    def num_sessions(self) -> int:
        """Sessions under a lease."""
        return len(self._leases)

    @property
    def tracing(self) -> Tracing:
        """Where its spans and metrics go."""
        return self._tracing

    def failure(self) -> str | None:
        """Say why this replica can no longer serve; None while it can."""
        return self._supervisor.failure

    async def serve(
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one stream of frames until its caller ends it, or this replica stops.

        Cancelling leaves sessions to their leases, so that a caller may reconnect.
        """
        stream = FrameStream(self._wire.make_frame)
        self._streams.add(stream)
        if self._drain_end is not None:
            stream.announce_drain(max(0.0, self._drain_end - self._clock()))
        try:
            await stream.run(
                request_iterator,
                context,
                take=partial(self._take_frame, stream),
                load=lambda: self.load,
                stopping=self._stopping,
            )
        finally:
            self._streams.discard(stream)
            self._calls.forget_stream(stream)

    def _take_frame(self, stream: FrameStream, frame: Any) -> None:
        num_before = self.num_sessions
        # Releases before calls: a session may be given up and opened anew in one frame.
        for release in frame.releases:
            self._leases.end(release.session_id)
            self.device.send(Release(release.session_id))
            if release.is_poison:
                self._supervisor.condemn(release.session_id)
        for message in frame.calls:
            self._take_call(stream, message)
        for cancel in frame.cancels:
            number = self._calls.number_of(stream, cancel.call_id)
            if number is not None:
                self.device.send(Cancel(number))
        # A link writes one frame a turn: nothing else is to come in this one.
        self.device.flush()
        if frame.HasField("heartbeat"):
            self._leases.renew(frame.heartbeat.session_ids)
            stream.report_load()
        if self.num_sessions != num_before and len(self._streams) > 1:
            # Else two orchestrators that choose one after the other would choose the same.
            self._tell_load()

    def _tell_load(self) -> None:
        """Have every orchestrator hear of the present load."""
        for stream in self._streams:
            stream.report_load()

    def _take_call(self, stream: FrameStream, message: Any) -> None:
        session = message.session
        try:
            codec.check_session(session)
            failure = self.failure()
            if failure is not None:
                raise PeerUnavailable(self._wire.span_name, failure)
            if session.session_id in self._suspects:
                raise DeviceDied(session.session_id, self._suspects.pop(session.session_id))
            if self.draining and session.session_id not in self._leases:
                raise Draining(self.replica_id)
            number = self._calls.next_number()
            call = self._wire.unpack_call(message, number)
        except SpecServeError as error:
            stream.push(
                self._wire.pack_failure(session.call_id, session.session_id, session.step, error)
            )
            return
        span = start_call_span(
            self._tracing, self._wire.span_name, session.traceparent, self.replica_id
        )
        self._calls.add(
            number, CallInFlight(stream, session.call_id, session.session_id, session.step, span)
        )
        self._leases.take(session.session_id)
        self.device.send(call)

    def _on_output(self, output: EngineOutput) -> None:
        if output.load.num_sessions < self._num_held:
            # Orchestrators whose requests wait for blocks hear at once that some are free.
            self._tell_load()
        self._num_held = output.load.num_sessions
        for reply in output.replies:
            call = self._calls.get(reply.call_id)
            if call is not None:
                call.stream.push(self._answer(reply, call))

    def _answer(self, reply: Reply, call: CallInFlight) -> Any:
        if isinstance(reply, CallFailed):
            if call.span is not None:
                call.span.note_error(reply.error)
            if isinstance(reply.error, SessionNotFound):
                self._leases.end(reply.session_id)
            self._calls.forget(reply.call_id)
            return self._wire.pack_failure(
                call.wire_call_id, reply.session_id, reply.step, reply.error
            )
        if not getattr(reply, "more_follows", False):
            if call.span is not None:
                call.span.note_timing(reply.timing)
            self._calls.forget(reply.call_id)
        return self._wire.pack_reply(reply, call.wire_call_id)

    def _on_death(self, computed: frozenset[str]) -> None:
        """Forget what the device held; its callers hear so, and their streams live on.

        Args:
            computed: the sessions that it was about.
        """
        self._leases.clear()
        self._suspects = dict.fromkeys(computed, len(computed))
        for call in self._calls.take_all():
            error: SpecServeError = SessionNotFound(call.session_id)
            if self._suspects.pop(call.session_id, None) is not None:
                error = DeviceDied(call.session_id, len(computed))
            if call.span is not None:
                call.span.note_error(error)
            call.stream.push(
                self._wire.pack_failure(call.wire_call_id, call.session_id, call.step, error)
            )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._leases.lease_s / 4)
            self.release_expired()

    def release_expired(self) -> None:
        """Release every session whose lease has run out."""
        for session_id in self._leases.end_expired(self._calls.sessions()):
            logger.info("lease of session %s ran out", session_id)
            self.device.send(Release(session_id))

    async def drain(self, deadline_s: float) -> None:
        """Refuse opens, tell clients, wait until no session is left or the deadline passes."""
        self._drain_end = end = self._clock() + deadline_s
        for stream in self._streams:
            stream.announce_drain(deadline_s)
        while self.num_sessions and self._clock() < end:  # noqa: ASYNC110 - rare, and bounded
            await asyncio.sleep(0.05)

    def end_streams(self) -> None:
        """End every stream of frames: an orchestrator's stays open for as long as it lives."""
        self._stopping.set()

    async def stop(self) -> None:
        """End the streams, the timers and the device."""
        self.end_streams()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._supervisor.close()
        await asyncio.to_thread(self._tracing.shutdown)
