"""The server end of streams of frames, for a service that runs a device: draft and target alike.

Matches replies to the streams that asked, keeps leases, restarts a dead device, drains. Knows no
proposal and no verification: a `Wire` translates those.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from opentelemetry import trace

from specserve import telemetry
from specserve.errors import (
    Draining,
    PeerUnavailable,
    SessionNotFound,
    SpecServeError,
)
from specserve.model.device import Device
from specserve.model.messages import (
    Call,
    CallFailed,
    Cancel,
    EngineLoad,
    EngineOutput,
    Release,
    Reply,
)
from specserve.rpc import codec
from specserve.rpc.channel import MAX_FRAME_ITEMS
from specserve.rpc.v1 import common_pb2

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""More device deaths than this within RESTART_WINDOW_S, and the replica reports itself failed."""

RESTART_WINDOW_S = 60.0


class Wire(Protocol):
    """Translates one service's calls and replies."""

    span_name: str

    def unpack_call(self, message: Any, call_id: int) -> Call:
        """Read a call; `call_id` is the engine's own number for it."""
        ...

    def pack_reply(self, reply: Reply, call_id: int) -> Any:
        """Write a reply; `call_id` is the caller's number for it."""
        ...

    def pack_failure(self, call_id: int, session_id: str, step: int, error: SpecServeError) -> Any:
        """Write the failure of one call."""
        ...

    def make_frame(self, **fields: Any) -> Any:
        """Make a reply frame."""
        ...


@dataclass(slots=True)
class _InFlight:
    stream: FrameStream
    wire_call_id: int
    session_id: str
    step: int
    span: trace.Span


class FrameStream:
    """One orchestrator's stream: what is to be written next."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.replies: list[Any] = []
        self.wake = asyncio.Event()
        self.drain_deadline_s: float | None = None
        self.sessions: set[str] = set()
        """Sessions last used through this stream."""

    def push(self, reply: Any) -> None:
        """Put a reply into the next frame."""
        self.replies.append(reply)
        self.wake.set()

    async def write_all(
        self, context: grpc.aio.ServicerContext[Any, Any], load: Callable[[], EngineLoad]
    ) -> None:
        """Write a frame whenever there is something to say, until cancelled."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            replies = self.replies[:MAX_FRAME_ITEMS]
            self.replies = self.replies[MAX_FRAME_ITEMS:]
            if self.replies:
                self.wake.set()
            drain, self.drain_deadline_s = self.drain_deadline_s, None
            notice = None if drain is None else common_pb2.DrainNotice(deadline_s=drain)
            await context.write(
                self._wire.make_frame(
                    replies=replies, load=codec.pack_load(load()), draining=notice
                )
            )


class ReplicaServer:
    """Sessions, leases and calls in flight of one replica; one event loop, one device."""

    def __init__(
        self,
        replica_id: str,
        wire: Wire,
        start_device: Callable[[], Awaitable[Device]],
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica_id = replica_id
        self.draining = False
        self._wire = wire
        self._start_device = start_device
        self._lease_s = lease_s
        self._clock = clock
        self._numbers = itertools.count(1)
        self._in_flight: dict[int, _InFlight] = {}
        self._by_wire_id: dict[tuple[FrameStream, int], int] = {}
        self._leases: dict[str, float] = {}
        self._streams: set[FrameStream] = set()
        self._stopping = asyncio.Event()
        self._tracer = trace.get_tracer("specserve.replica")
        self._device: Device | None = None
        self._deaths: list[float] = []
        self._failure: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the device; raises what its start-up raised."""
        await self._adopt(await self._start_device())
        self._tasks = [
            asyncio.create_task(self._sweep(), name=f"leases-{self.replica_id}"),
            asyncio.create_task(self._watch(), name=f"device-{self.replica_id}"),
        ]

    async def _adopt(self, device: Device) -> None:
        device.on_output = self._on_output
        self._device = device

    @property
    def device(self) -> Device:
        """The running device."""
        if self._device is None:
            raise PeerUnavailable(self._wire.span_name, "the device has not started")
        return self._device

    @property
    def num_sessions(self) -> int:
        """Sessions under a lease."""
        return len(self._leases)

    def failure(self) -> str | None:
        """Say why this replica can no longer serve; None while it can."""
        return self._failure

    async def serve(
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one stream of frames until its caller ends it, or this replica stops.

        Cancelling leaves sessions to their leases, so that a caller may reconnect.
        """
        stream = FrameStream(self._wire)
        self._streams.add(stream)
        if self.draining:
            stream.drain_deadline_s = 0.0
            stream.wake.set()
        tasks = [
            asyncio.create_task(self._read(stream, request_iterator)),
            asyncio.create_task(stream.write_all(context, lambda: self.device.load)),
            asyncio.create_task(self._stopping.wait()),
        ]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # a broken stream ends with its own error
        finally:
            self._streams.discard(stream)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for call_id, entry in list(self._in_flight.items()):
                if entry.stream is stream:
                    self._forget(call_id)

    async def _read(self, stream: FrameStream, request_iterator: Any) -> None:
        async for frame in request_iterator:
            self._take_frame(stream, frame)

    def _take_frame(self, stream: FrameStream, frame: Any) -> None:
        # Releases before calls: a session may be given up and opened anew in one frame.
        for release in frame.releases:
            self._leases.pop(release.session_id, None)
            stream.sessions.discard(release.session_id)
            self.device.send(Release(release.session_id))
        for message in frame.calls:
            self._take_call(stream, message)
        for cancel in frame.cancels:
            number = self._by_wire_id.get((stream, cancel.call_id))
            if number is not None:
                self.device.send(Cancel(number))
        if frame.HasField("heartbeat"):
            now = self._clock()
            for session_id in frame.heartbeat.session_ids:
                if session_id in self._leases:
                    self._leases[session_id] = now
            stream.wake.set()

    def _take_call(self, stream: FrameStream, message: Any) -> None:
        session = message.session
        try:
            codec.check_session(session)
            if self._failure is not None:
                raise PeerUnavailable(self._wire.span_name, self._failure)
            if self.draining and session.session_id not in self._leases:
                raise Draining(self.replica_id)
            number = next(self._numbers)
            call = self._wire.unpack_call(message, number)
        except SpecServeError as error:
            stream.push(
                self._wire.pack_failure(session.call_id, session.session_id, session.step, error)
            )
            return
        span: trace.Span = trace.INVALID_SPAN
        if session.traceparent:
            span = self._tracer.start_span(
                self._wire.span_name,
                context=telemetry.from_traceparent(session.traceparent),
                kind=trace.SpanKind.SERVER,
                attributes={telemetry.ATTRIBUTE_REPLICA: self.replica_id},
            )
        self._in_flight[number] = _InFlight(
            stream, session.call_id, session.session_id, session.step, span
        )
        self._by_wire_id[stream, session.call_id] = number
        self._leases[session.session_id] = self._clock()
        stream.sessions.add(session.session_id)
        self.device.send(call)

    def _on_output(self, output: EngineOutput) -> None:
        for reply in output.replies:
            entry = self._in_flight.get(reply.call_id)
            if entry is None:
                continue
            if isinstance(reply, CallFailed):
                message = self._wire.pack_failure(
                    entry.wire_call_id, reply.session_id, reply.step, reply.error
                )
                if entry.span.is_recording():
                    entry.span.set_status(trace.StatusCode.ERROR, type(reply.error).__name__)
                if isinstance(reply.error, SessionNotFound):
                    self._leases.pop(reply.session_id, None)
                self._forget(reply.call_id)
            else:
                message = self._wire.pack_reply(reply, entry.wire_call_id)
                if not getattr(reply, "more_follows", False):
                    if entry.span.is_recording():
                        entry.span.set_attributes(
                            {
                                telemetry.ATTRIBUTE_QUEUE_S: reply.timing.queue_s,
                                telemetry.ATTRIBUTE_FORWARD_S: reply.timing.forward_s,
                                telemetry.ATTRIBUTE_BATCH_SIZE: reply.timing.batch_size,
                                telemetry.ATTRIBUTE_ROWS: reply.timing.rows,
                            }
                        )
                    self._forget(reply.call_id)
            entry.stream.push(message)

    def _forget(self, call_id: int) -> None:
        entry = self._in_flight.pop(call_id, None)
        if entry is not None:
            self._by_wire_id.pop((entry.stream, entry.wire_call_id), None)
            entry.span.end()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            self.release_expired()

    def release_expired(self) -> None:
        """Release every session whose lease has run out."""
        now = self._clock()
        busy = {entry.session_id for entry in self._in_flight.values()}
        for session_id, seen in list(self._leases.items()):
            if now - seen > self._lease_s and session_id not in busy:
                logger.info("lease of session %s ran out", session_id)
                del self._leases[session_id]
                self.device.send(Release(session_id))

    async def _watch(self) -> None:
        """Restart a device that died: its sessions are gone, its streams are not."""
        while True:
            why = await self.device.failed
            now = self._clock()
            self._deaths = [t for t in self._deaths if now - t < RESTART_WINDOW_S] + [now]
            logger.error("device of %s died: %s", self.replica_id, why)
            self._leases.clear()
            for call_id, entry in list(self._in_flight.items()):
                error = SessionNotFound(entry.session_id)
                entry.stream.push(
                    self._wire.pack_failure(entry.wire_call_id, entry.session_id, entry.step, error)
                )
                self._forget(call_id)
            if len(self._deaths) > MAX_RESTARTS:
                self._failure = f"the device died {len(self._deaths)} times, last: {why}"
                return
            self._failure = f"the device is being restarted after: {why}"
            try:
                await self._adopt(await self._start_device())
            except SpecServeError as error:
                self._failure = f"the device does not start again: {error}"
                return
            self._failure = None

    async def drain(self, deadline_s: float) -> None:
        """Refuse opens, tell clients, wait until no session is left or the deadline passes."""
        self.draining = True
        for stream in self._streams:
            stream.drain_deadline_s = deadline_s
            stream.wake.set()
        end = self._clock() + deadline_s
        while self._leases and self._clock() < end:  # noqa: ASYNC110 - rare, and bounded
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
        if self._device is not None:
            await self._device.close()

    def stats(self) -> dict[str, float]:
        """Give the load for autoscaling."""
        load = self.device.load
        used = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
        return {
            "num_sessions": float(self.num_sessions),
            "num_waiting": float(load.num_waiting),
            "kv_cache_usage": used,
        }


def model_response(
    replica: ReplicaServer, vocabulary: Any, request: common_pb2.GetModelRequest, max_k: int
) -> common_pb2.GetModelResponse:
    """Say what a replica serves. `vocabulary` is None for a proposer without a model."""
    info = replica.device.info
    response = common_pb2.GetModelResponse(
        protocol_version=codec.PROTOCOL_VERSION,
        model_id=info.model_id,
        revision=info.revision,
        weights_fingerprint=info.weights_fingerprint,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        dtype=info.dtype,
        device=info.device,
        replica_id=replica.replica_id,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        weights_bytes=info.weights_bytes,
        kv_cache_bytes=info.kv_cache_bytes,
        max_num_speculative_tokens=max_k,
        draining=replica.draining,
        load=codec.pack_load(replica.device.load),
    )
    if vocabulary is not None:
        table = vocabulary.token_table()
        response.vocab_fingerprint = table.fingerprint
        response.eos_token_ids = codec.pack_ids(vocabulary.eos_token_ids)
        if request.include_token_table:
            response.token_table = table.to_bytes()
    return response
