"""The server end of streams: leases, replies to the right caller, a device that dies, draining."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from helpers.waiting import eventually
from specserve.config import ServerConfig, SpeculativeConfig
from specserve.draft.servicer import DraftServicer, DraftWire
from specserve.errors import CapacityExhausted, ConfigurationError, PeerUnavailable, SpecServeError
from specserve.model.messages import (
    CallFailed,
    CallTiming,
    Cancel,
    EngineLoad,
    EngineOutput,
    Message,
    ModelInfo,
    ProposeCall,
    ProposeReply,
    Release,
)
from specserve.rpc import codec
from specserve.rpc.channel import MAX_FRAME_ITEMS
from specserve.rpc.device_deaths import MAX_RESTARTS
from specserve.rpc.replica import ReplicaServer
from specserve.rpc.replica_service import ReplicaService
from specserve.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc

INFO = ModelInfo("fake", "", "f", 32, 64, "float32", "cpu", 8, 16, 0, 0)
LEASE_S = 10.0
RESTART_S = 0.2
"""By the setup's clock, which stands still; a hanging device is looked at more often than that."""


class FakeDevice:
    """Notes what it is sent; answers what the test says."""

    def __init__(self) -> None:
        self.info = INFO
        self.num_looks = 0
        """Times that somebody asked for the load."""
        self.load = EngineLoad(8, 8, 0, 0, 0)
        self.computed: frozenset[str] = frozenset()
        self.on_output: Any = None
        self.failed: asyncio.Future[SpecServeError] = asyncio.get_running_loop().create_future()
        self.sent: list[Message] = []
        self.is_closed = False

    @property
    def load(self) -> EngineLoad:
        """The load that the test says it has."""
        self.num_looks += 1
        return self._load

    @load.setter
    def load(self, load: EngineLoad) -> None:
        self._load = load

    async def start(self) -> None:
        """Nothing to load."""

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def flush(self) -> None:
        """What is sent is there at once."""

    async def close(self) -> None:
        self.is_closed = True

    @property
    def calls(self) -> list[ProposeCall]:
        return [message for message in self.sent if isinstance(message, ProposeCall)]

    @property
    def released(self) -> list[str]:
        return [message.session_id for message in self.sent if isinstance(message, Release)]

    def reply(self, call: ProposeCall) -> None:
        """Answer a call."""
        reply = ProposeReply(
            call.call_id, call.session_id, call.step, 3, 0, (1, 2), None, CallTiming(0, 0, 1, 1)
        )
        self.on_output(EngineOutput((reply,), self.load))


class Client:
    """One stream of frames, without a network."""

    def __init__(self, replica: ReplicaServer) -> None:
        self._replica = replica
        self._frames: asyncio.Queue[draft_pb2.ProposeFrame | None] = asyncio.Queue()
        self.replies: list[draft_pb2.ProposeReply] = []
        self.frames: list[draft_pb2.ProposeReplyFrame] = []
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        serving = self._replica.serve(self._requests(), self)  # type: ignore[arg-type]
        self.task = asyncio.create_task(serving)

    async def _requests(self) -> AsyncIterator[draft_pb2.ProposeFrame]:
        while (frame := await self._frames.get()) is not None:
            yield frame

    async def write(self, frame: draft_pb2.ProposeReplyFrame) -> None:
        self.frames.append(frame)
        self.replies += frame.replies

    def send(self, **fields: Any) -> None:
        self._frames.put_nowait(draft_pb2.ProposeFrame(**fields))

    async def end(self) -> None:
        """End the stream from the client's side."""
        self._frames.put_nowait(None)
        assert self.task is not None
        await self.task

    async def answered(self, count: int = 1) -> list[draft_pb2.ProposeReply]:
        """Wait for so many replies in all."""
        await eventually(lambda: len(self.replies) >= count, f"{count} replies")
        return self.replies


def call(session_id: str = "s", call_id: int = 1, *, step: int = 1, k: int = 2) -> Any:
    """Make a call that opens or goes on with a session."""
    return draft_pb2.ProposeCall(
        session=common_pb2.SessionCall(
            call_id=call_id,
            session_id=session_id,
            epoch=1,
            step=step,
            append_token_ids=codec.pack_ids((5, 6)),
        ),
        num_speculative_tokens=k,
    )


class Setup:
    """A replica with fake devices and a clock that stands still."""

    def __init__(self, restart_s: float = 1e6) -> None:
        self.now = 0.0
        self.devices: list[FakeDevice] = []
        self.refuse_start = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.replica = ReplicaServer(
            "draft-test", DraftWire(), self._start, LEASE_S, restart_s, clock=lambda: self.now
        )
        self._clients: list[Client] = []

    async def _start(self) -> FakeDevice:
        await self.gate.wait()
        if self.refuse_start:
            raise PeerUnavailable("device", "no memory")
        self.devices.append(FakeDevice())
        return self.devices[-1]

    @property
    def device(self) -> FakeDevice:
        return self.devices[-1]

    def client(self) -> Client:
        client = Client(self.replica)
        client.start()
        self._clients.append(client)
        return client

    async def opened(self, client: Client, session_id: str = "s", call_id: int = 1) -> ProposeCall:
        """Send a call and wait until the device has it."""
        count = len(self.device.calls)
        client.send(calls=[call(session_id, call_id)])
        await eventually(lambda: len(self.device.calls) > count, "the device has the call")
        return self.device.calls[-1]


@asynccontextmanager
async def replica_setup(restart_s: float = 1e6) -> AsyncIterator[Setup]:
    """Start a replica, stop it at the end."""
    setup = Setup(restart_s)
    await setup.replica.start()
    try:
        yield setup
    finally:
        await setup.replica.stop()
        for client in setup._clients:
            if client.task is not None:
                await asyncio.wait_for(client.task, 5.0)


async def test_reply_goes_to_its_stream_under_its_callers_number() -> None:
    """Two orchestrators may use one call id; each gets its own answer."""
    async with replica_setup() as setup:
        one, two = setup.client(), setup.client()
        first = await setup.opened(one, "a", call_id=7)
        second = await setup.opened(two, "b", call_id=7)
        assert first.call_id != second.call_id
        setup.device.reply(second)
        assert (await two.answered())[0].session_id == "b"
        assert one.replies == []
        setup.device.reply(first)
        reply = (await one.answered())[0]
        assert (reply.call_id, reply.session_id, reply.step, reply.cached_length) == (7, "a", 1, 3)
        assert codec.unpack_ids(reply.draft_token_ids, "ids") == (1, 2)
        assert one.frames[-1].load.num_blocks == 8


async def test_orchestrators_hear_at_once_what_the_others_open_and_end() -> None:
    """The report says how many call and how many sessions there are, before the device does."""
    async with replica_setup() as setup:
        one, two = setup.client(), setup.client()
        await setup.opened(two, "x")
        await eventually(lambda: bool(one.frames), "the other hears of the opening")
        assert (one.frames[-1].load.num_sessions, one.frames[-1].load.num_callers) == (1, 2)
        two.send(releases=[common_pb2.Release(session_id="x")])
        await eventually(lambda: one.frames[-1].load.num_sessions == 0, "and of the end")


async def test_reply_after_its_stream_was_lost_is_dropped_B077() -> None:
    """The session waits for its caller to return; the reply finds nobody and harms nothing."""
    async with replica_setup() as setup:
        client = setup.client()
        lost = await setup.opened(client)
        await client.end()
        setup.device.reply(lost)
        assert setup.replica.num_sessions == 1
        back = setup.client()
        again = await setup.opened(back)
        setup.device.reply(again)
        assert len(await back.answered()) == 1


async def test_lease_runs_out_without_heartbeat_or_call_B188() -> None:
    """Whatever became of the caller, its session is released after the lease, and only then."""
    async with replica_setup() as setup:
        client = setup.client()
        setup.device.reply(await setup.opened(client))
        await client.end()
        setup.now = LEASE_S
        setup.replica.release_expired()
        assert setup.device.released == []
        setup.now = LEASE_S + 0.1
        setup.replica.release_expired()
        setup.replica.release_expired()
        assert setup.device.released == ["s"]
        assert setup.replica.num_sessions == 0


async def test_heartbeat_renews_the_sessions_it_names_and_no_other() -> None:
    """It is also answered with the present load, and does not invent sessions."""
    async with replica_setup() as setup:
        client = setup.client()
        for number, session_id in enumerate(("a", "b"), start=1):
            setup.device.reply(await setup.opened(client, session_id, number))
        setup.now = 8.0
        count = len(client.frames)
        client.send(heartbeat=common_pb2.Heartbeat(session_ids=["a", "unknown"]))
        await eventually(lambda: len(client.frames) > count, "the heartbeat was answered")
        setup.now = 12.0
        setup.replica.release_expired()
        assert setup.device.released == ["b"]
        assert setup.replica.num_sessions == 1


async def test_session_with_a_call_in_flight_keeps_its_lease() -> None:
    """A forward longer than the lease must not take its own session away."""
    async with replica_setup() as setup:
        client = setup.client()
        pending = await setup.opened(client)
        setup.now = 3 * LEASE_S
        setup.replica.release_expired()
        assert setup.device.released == []
        setup.device.reply(pending)
        await client.answered()
        setup.replica.release_expired()
        assert setup.device.released == ["s"]


async def test_cancel_and_release_reach_the_device() -> None:
    """A cancel goes on under the device's number, an unknown one nowhere; releases may repeat."""
    async with replica_setup() as setup:
        client = setup.client()
        pending = await setup.opened(client, call_id=7)
        client.send(cancels=[common_pb2.Cancel(call_id=n) for n in (7, 8)])
        release = common_pb2.Release(session_id="s")
        client.send(releases=[release, release, common_pb2.Release(session_id="other")])
        await eventually(lambda: len(setup.device.released) == 3, "released")
        assert [m for m in setup.device.sent if isinstance(m, Cancel)] == [Cancel(pending.call_id)]
        assert setup.replica.num_sessions == 0


async def test_release_acts_before_the_calls_of_its_frame() -> None:
    """A session given up and opened anew in one frame lives on."""
    async with replica_setup() as setup:
        client = setup.client()
        setup.device.reply(await setup.opened(client))
        client.send(calls=[call(call_id=2)], releases=[common_pb2.Release(session_id="s")])
        await eventually(lambda: len(setup.device.calls) == 2, "the second call came")
        assert isinstance(setup.device.sent[-2], Release)
        assert setup.replica.num_sessions == 1


@pytest.mark.parametrize(
    ("spoiled", "text"),
    [
        (call(call_id=0), "call_id"),
        (call(session_id=""), "session_id"),
        (call(k=65), "num_speculative_tokens"),
        (
            draft_pb2.ProposeCall(
                session=common_pb2.SessionCall(call_id=1, session_id="s", append_token_ids=b"123")
            ),
            "append_token_ids",
        ),
        (
            draft_pb2.ProposeCall(
                session=common_pb2.SessionCall(
                    call_id=1, session_id="s", opening=common_pb2.SessionOpening()
                )
            ),
            "sampling.rule",
        ),
    ],
)
async def test_malformed_call_is_answered_and_the_stream_lives_on(spoiled: Any, text: str) -> None:
    """One caller's mistake is an error in that call's reply, naming the field."""
    async with replica_setup() as setup:
        client = setup.client()
        client.send(calls=[spoiled, call("good", 2)])
        reply = (await client.answered())[0]
        assert reply.error.error == "InvalidRequest"
        assert reply.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert text in reply.error.message
        assert reply.call_id == spoiled.session.call_id
        assert [sent.session_id for sent in setup.device.calls] == ["good"]
        setup.device.reply(setup.device.calls[0])
        assert len(await client.answered(2)) == 2


async def test_failed_call_is_answered_with_its_own_error() -> None:
    """The device's refusal of one call travels in that call's reply."""
    async with replica_setup() as setup:
        client = setup.client()
        pending = await setup.opened(client)
        failure = CallFailed(pending.call_id, "s", 1, CapacityExhausted("KV blocks", 3, 1))
        setup.device.on_output(EngineOutput((failure,), setup.device.load))
        reply = (await client.answered())[0]
        assert reply.error.error == "CapacityExhausted"
        assert "3 wanted, 1 available" in reply.error.message


async def test_dead_device_is_restarted_and_its_calls_are_answered() -> None:
    """Calls in flight hear SessionNotFound at once; new ones get the new device; streams live."""
    async with replica_setup() as setup:
        client = setup.client()
        await setup.opened(client, "a", 1)
        dead = setup.device
        setup.gate.clear()
        dead.failed.set_result(PeerUnavailable("device", "exit code -9"))
        reply = (await client.answered())[0]
        assert (reply.call_id, reply.error.error) == (1, "SessionNotFound")
        assert setup.replica.num_sessions == 0
        assert "exit code -9" in (setup.replica.failure() or "")
        client.send(calls=[call("b", 2)])
        reply = (await client.answered(2))[1]
        assert (reply.call_id, reply.error.error) == (2, "PeerUnavailable")
        setup.gate.set()
        await eventually(lambda: setup.replica.failure() is None, "restarted")
        assert setup.device is not dead
        setup.device.reply(await setup.opened(client, "c", 3))
        assert not (await client.answered(3))[2].HasField("error")


async def test_sessions_that_a_device_dies_with_are_told_so_and_no_others() -> None:
    """Those in its last forward hear with how many, at once or with their next call; who waited
    for one hears that its session is gone, in words that a peer of the version before knows."""
    async with replica_setup() as setup:
        client = setup.client()
        for number, name in enumerate(("a", "b", "c"), 1):
            asked = await setup.opened(client, name, number)
        setup.device.reply(asked)  # nobody waits for c: it was drafted ahead for
        await client.answered()
        dead = setup.device
        dead.computed = frozenset({"a", "c"})
        dead.failed.set_result(PeerUnavailable("device", "exit code -9"))
        told = {reply.call_id: reply.error for reply in (await client.answered(3))[1:]}
        await eventually(lambda: setup.device is not dead, "restarted")
        client.send(calls=[call("c", 4, step=2)])
        told[4] = (await client.answered(4))[3].error
        assert {error.error for error in told.values()} == {"SessionNotFound"}
        assert {number: error.num_computed for number, error in told.items()} == {1: 2, 2: 0, 4: 2}
        setup.device.reply(await setup.opened(client, "c", 5))
        assert not (await client.answered(5))[4].HasField("error")


async def test_device_that_hangs_with_calls_to_answer_is_started_anew() -> None:
    """One that stands still is ended, its calls hear so, and the next one serves."""
    async with replica_setup(RESTART_S) as setup:
        client = setup.client()
        await setup.opened(client)
        hung = setup.device

        def is_replaced() -> bool:
            setup.now += RESTART_S
            return setup.device is not hung

        await eventually(is_replaced, "another device")
        assert hung.is_closed
        assert (await client.answered())[0].error.error == "SessionNotFound"
        setup.device.reply(await setup.opened(client, "b", 2))
        assert not (await client.answered(2))[1].HasField("error")
        assert setup.replica.failure() is None


async def test_device_that_is_slow_or_idle_is_left_alone_B169() -> None:
    """A step may take long, but not for ever; and a device without work need not move at all."""
    async with replica_setup(RESTART_S) as setup:
        client, device = setup.client(), setup.device

        async def looked_at() -> None:
            seen = device.num_looks
            await eventually(lambda: device.num_looks > seen + 1, "looked at")

        await looked_at()
        setup.now += 1000 * RESTART_S
        await looked_at()
        asked = await setup.opened(client)
        for number in range(1, 6):
            await looked_at()
            setup.now += 0.9 * RESTART_S
            device.load = EngineLoad(8, 8, 1, 0, number)
        await looked_at()
        assert setup.replica.failure() is None
        device.reply(asked)
        assert not (await client.answered())[0].HasField("error")
        assert setup.devices == [device]


async def test_device_that_keeps_dying_makes_the_replica_fail() -> None:
    """After a few deaths within a minute the replica says so, for its supervisor to replace it."""
    async with replica_setup() as setup:
        for number in range(MAX_RESTARTS + 1):
            assert setup.replica.failure() is None
            setup.now += 1.0
            setup.device.failed.set_result(PeerUnavailable("device", "again"))
            await eventually(
                lambda n=number: (
                    (len(setup.devices) == n + 2 and setup.replica.failure() is None)
                    or n == MAX_RESTARTS
                ),
                "restarted",
            )
        await eventually(setup.replica.failure, "it gave up")
        assert f"died {MAX_RESTARTS + 1} times" in (setup.replica.failure() or "")


async def test_deaths_of_a_condemned_session_are_not_the_devices_own() -> None:
    """A death in company is blamed on the one that another replica's device died of alone: its
    orchestrator says so, before or after, and however often such requests come."""
    async with replica_setup() as setup:
        client = setup.client()
        for number in range(2 * MAX_RESTARTS):
            setup.now += 1.0
            setup.device.reply(await setup.opened(client, f"good-{number}", 2 * number + 1))
            setup.device.computed = frozenset({f"poison-{number}", f"other-{number}"})
            setup.device.failed.set_result(PeerUnavailable("device", "again"))
            await eventually(lambda n=number: len(setup.devices) == n + 2, "restarted")
            await eventually(lambda: setup.replica.failure() is None, "it serves")
            release = common_pb2.Release(session_id=f"poison-{number}", is_poison=True)
            client.send(releases=[release])
            await eventually(lambda: setup.device.released, "it was heard")


async def test_device_that_hangs_in_a_condemned_session_is_ended_at_once() -> None:
    """Its callers hear what it has been computing for long; once another device is known to have
    been lost in one of these, nobody waits for this one, and its end is not its own fault."""
    async with replica_setup() as setup:
        client = setup.client()
        hung = setup.device
        await setup.opened(client, "poison", 1)
        hung.computed = frozenset({"poison", "other"})
        client.send(heartbeat=common_pb2.Heartbeat())
        await eventually(lambda: client.frames, "a load")
        assert not client.frames[-1].load.stuck_session_ids
        setup.now += 1.5
        client.send(heartbeat=common_pb2.Heartbeat())
        await eventually(lambda: client.frames[-1].load.stuck_session_ids, "what it is stuck in")
        assert set(client.frames[-1].load.stuck_session_ids) == hung.computed
        client.send(releases=[common_pb2.Release(session_id="another", is_poison=True)])
        client.send(releases=[common_pb2.Release(session_id="poison", is_poison=True)])
        await eventually(lambda: setup.device is not hung, "another device")
        assert hung.is_closed
        assert "another" in hung.released
        assert setup.replica.failure() is None


async def test_device_that_does_not_start_again_makes_the_replica_fail() -> None:
    """The reason is kept for the health check."""
    async with replica_setup() as setup:
        setup.refuse_start = True
        setup.device.failed.set_result(PeerUnavailable("device", "gone"))
        await eventually(lambda: "no memory" in (setup.replica.failure() or ""), "it failed")


async def test_draining_refuses_opens_and_serves_live_sessions() -> None:
    """Live sessions go on until they end; then the drain is over. New streams are told at once."""
    async with replica_setup() as setup:
        client = setup.client()
        setup.device.reply(await setup.opened(client, "live"))
        draining = asyncio.create_task(setup.replica.drain(30.0))
        await eventually(lambda: any(f.HasField("draining") for f in client.frames), "told")
        assert client.frames[-1].draining.deadline_s == 30.0
        client.send(calls=[call("new", 2), call("live", 3, step=2)])
        await eventually(lambda: len(setup.device.calls) == 2, "the live session's call came")
        reply = (await client.answered(2))[1]
        assert (reply.call_id, reply.error.error) == (2, "Draining")
        late = setup.client()
        await eventually(lambda: late.frames and late.frames[0].HasField("draining"), "told")
        setup.device.reply(setup.device.calls[-1])
        client.send(releases=[common_pb2.Release(session_id="live")])
        await asyncio.wait_for(draining, 5.0)


async def test_drain_ends_at_its_deadline() -> None:
    """A session that never ends does not hold a replica for ever."""
    async with replica_setup() as setup:
        client = setup.client()
        await setup.opened(client)
        draining = asyncio.create_task(setup.replica.drain(30.0))
        await asyncio.sleep(0)
        assert not draining.done()
        setup.now = 31.0
        await asyncio.wait_for(draining, 5.0)
        assert setup.replica.num_sessions == 1


async def test_many_replies_are_split_into_frames() -> None:
    """What one iteration has to say never exceeds the largest message."""
    async with replica_setup() as setup:
        client = setup.client()
        count = 2 * MAX_FRAME_ITEMS + 1
        client.send(calls=[call(f"s{n}", n + 1) for n in range(count)])
        await eventually(lambda: len(setup.device.calls) == count, "all came")
        for sent in setup.device.calls:
            setup.device.reply(sent)
        await client.answered(count)
        assert max(len(frame.replies) for frame in client.frames) == MAX_FRAME_ITEMS
        assert [reply.call_id for reply in client.replies] == list(range(1, count + 1))


async def test_stop_ends_streams_and_device() -> None:
    """A stream that its caller would keep open for ever does not delay the stop."""
    async with replica_setup() as setup:
        client = setup.client()
        await setup.opened(client)
        device = setup.device
    assert device.is_closed
    assert client.task is not None
    assert client.task.done()


async def test_noise_at_the_port_leaves_the_process_alive_B239() -> None:
    """Random bytes, a truncated frame and a pickle close their own connection and nothing else."""
    noise = random.Random(5)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\0\0\0\x04\0\0\0\0\0"

    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (pytest.fail, ("somebody unpickled what came from the network",))

    pieces = [noise.randbytes(size) for size in (1, 9, 100, 5000)] + [
        pickle.dumps(Trap()),
        preface[:10],
        preface + settings[:5],
        preface + settings + b"\0\xff\xff\x01\x05\0\0\0\x01" + noise.randbytes(50),
    ]
    setup = Setup()
    service = await ReplicaService.start(
        setup.replica,
        "draft",
        ServerConfig(),
        "specserve.rpc.v1.DraftService",
        lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(
            DraftServicer(setup.replica, None, SpeculativeConfig()), server
        ),
    )
    try:
        host, _, port = service.address.rpartition(":")
        for piece in pieces:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(piece)
            await writer.drain()
            writer.close()
        async with grpc.aio.insecure_channel(service.address) as channel:
            garbled = channel.stream_stream("/specserve.rpc.v1.DraftService/Propose")
            stream = garbled()
            await stream.write(noise.randbytes(300))
            assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            model = await stub.GetModel(common_pb2.GetModelRequest())
            assert model.replica_id == "draft-test"
            good = stub.Propose()
            await good.write(draft_pb2.ProposeFrame(calls=[call()]))
            await eventually(lambda: setup.device.calls, "the call came")
            setup.device.reply(setup.device.calls[0])
            frame = await good.read()
            assert frame.replies[0].call_id == 1
            good.cancel()
    finally:
        await service.stop()


async def test_start_that_cannot_bind_leaves_no_device() -> None:
    """A taken port is a ConfigurationError, and the device that was loaded already is closed."""
    first, second = Setup(), Setup()

    def register(server: grpc.aio.Server) -> None:
        """Serve nothing."""

    name = "specserve.rpc.v1.DraftService"
    service = await ReplicaService.start(first.replica, "draft", ServerConfig(), name, register)
    try:
        port = int(service.address.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=str(port)):
            await ReplicaService.start(
                second.replica, "draft", ServerConfig(port=port), name, register
            )
        assert second.device.is_closed
    finally:
        await service.stop()
