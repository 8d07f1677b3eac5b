"""A link carries many calls over one stream, and outlives the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from helpers.replica import FakeReplica, serving
from helpers.waiting import eventually
from specserve.errors import DeviceDied, PeerUnavailable
from specserve.orchestrator.pool import DRAFT_KIND, DraftLink
from specserve.rpc import link as link_module
from specserve.rpc.channel import MAX_FRAME_ITEMS
from specserve.rpc.link import FrameLink
from specserve.rpc.pending import PendingCall
from specserve.rpc.v1 import common_pb2, draft_pb2

Pending = PendingCall[draft_pb2.ProposeCall, draft_pb2.ProposeReply]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream comes back in time, however busy the machine is."""
    monkeypatch.setattr(link_module, "RECONNECT_TIMEOUT_S", 60.0)


@asynccontextmanager
async def linked(
    address: str, *, heartbeat_s: float = 30.0, hang_s: float = 30.0, **fields: Callable[[], float]
) -> AsyncIterator[DraftLink]:
    """Start a link and wait until it is connected."""
    link: DraftLink = FrameLink(
        DRAFT_KIND, address, heartbeat_s=heartbeat_s, hang_s=hang_s, **fields
    )
    link.start()
    try:
        await eventually(lambda: link.connected, "connected")
        yield link
    finally:
        await link.close()


def send(
    link: DraftLink, session_id: str = "s", *, step: int = 1, streaming: bool = False
) -> Pending:
    """Send a call of a session."""
    call_id = link.next_call_id()
    session = common_pb2.SessionCall(call_id=call_id, session_id=session_id, step=step)
    link.sessions.add(session_id)
    return link.send(draft_pb2.ProposeCall(session=session), call_id, streaming=streaming)


async def test_calls_of_one_turn_share_a_frame() -> None:
    """Ten calls sent without a pause leave in one frame; replies find them in any order."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address) as link:
        await eventually(lambda: replica.num_open == 1, "the stream is open")
        replica.frames.clear()
        calls = [send(link, f"s{i}") for i in range(10)]
        await eventually(lambda: len(replica.calls) == 10, "all calls came")
        assert [len(frame.calls) for frame in replica.frames if frame.calls] == [10]
        await replica.reply(*(call.call_id for call in reversed(calls)))
        for call in calls:
            assert (await call.next(5.0)).call_id == call.call_id
        assert link.num_pending == 0


@pytest.mark.slow
async def test_burst_of_calls_is_split_into_frames_of_bounded_size() -> None:
    """A burst of long prompts never adds up to a frame that the peer would refuse."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address) as link:
        calls = []
        for i in range(2 * MAX_FRAME_ITEMS + 1):
            session = common_pb2.SessionCall(
                call_id=link.next_call_id(), session_id=f"s{i}", append_token_ids=b"\0" * 262_144
            )
            call = draft_pb2.ProposeCall(session=session)
            calls.append(link.send(call, session.call_id))
        await eventually(lambda: len(replica.calls) == len(calls), "all calls came", 30.0)
        assert max(len(frame.calls) for frame in replica.frames) <= MAX_FRAME_ITEMS
        assert link.connected


async def test_lost_stream_sends_open_calls_again_unchanged_B154() -> None:
    """One-shot calls go out again with the same id and step; answered ones do not."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address) as link:
        answered, open_call = send(link, "a"), send(link, "b", step=7)
        await eventually(lambda: len(replica.calls) == 2, "both calls came")
        await replica.reply(answered.call_id)
        await answered.next(5.0)
        before = replica.calls[1]
        replica.frames.clear()
        replica.end_streams()
        await eventually(lambda: replica.calls, "a call came again")
        assert replica.calls == [before]
        assert replica.num_streams == 2
        await replica.reply(open_call.call_id)
        assert (await open_call.next(5.0)).call_id == open_call.call_id
        assert link.sessions == {"a", "b"}


async def test_lost_stream_fails_decode_ahead() -> None:
    """Replies of decode-ahead were seen in part: its caller goes on from what it has committed."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address) as link:
        ahead, single = send(link, "a", streaming=True), send(link, "b")
        await eventually(lambda: len(replica.calls) == 2, "both calls came")
        replica.frames.clear()
        replica.end_streams()
        with pytest.raises(PeerUnavailable):
            await ahead.next(5.0)
        assert link.is_returning or link.connected
        # One that was never sent over the lost stream may wait for the next.
        later = send(link, "c", streaming=True)
        await eventually(lambda: len(replica.calls) == 2, "two calls came")
        assert {call.session_id for call in replica.calls} == {"b", "c"}
        await replica.reply(single.call_id, later.call_id)
        await single.next(5.0)
        await later.next(5.0)


@pytest.mark.slow
async def test_server_that_is_gone_fails_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is not kept for ever: past the reconnect timeout it ends with PeerUnavailable."""
    monkeypatch.setattr(link_module, "RECONNECT_TIMEOUT_S", 0.3)
    replica = FakeReplica()
    changes: list[bool] = []
    async with serving(replica) as address:
        link: DraftLink = FrameLink(DRAFT_KIND, address, heartbeat_s=30, hang_s=30)
        link.on_change = lambda: changes.append(link.connected)
        link.start()
        await eventually(lambda: link.connected, "connected")
        call = send(link)
        await eventually(lambda: replica.calls, "the call came")
    with pytest.raises(PeerUnavailable, match=address):
        await call.next(10.0)
    assert changes == [True, False]
    assert not link.is_returning
    await link.close()


async def test_replaced_replica_is_sent_nothing_of_the_old_one() -> None:
    """Another process at the address: open calls fail, its sessions are forgotten."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address) as link:
        call = send(link)
        await eventually(lambda: replica.calls, "the call came")
        replica.frames.clear()
        replica.replica_id = "two"
        link.release("s")
        link.sessions.add("t")
        replica.end_streams()
        with pytest.raises(PeerUnavailable, match="replaced"):
            await call.next(5.0)
        assert link.sessions == set()
        fresh = send(link, "new")
        await eventually(lambda: replica.calls, "the new call came")
        assert [session.session_id for session in replica.calls] == ["new"]
        assert link.model is not None
        assert link.model.replica_id == "two"
        await replica.reply(fresh.call_id)
        await fresh.next(5.0)


async def test_draining_is_learnt_from_the_stream_and_from_the_handshake() -> None:
    """Either way the pool hears of it, and live sessions go on."""
    replica = FakeReplica()
    changes: list[bool] = []
    async with serving(replica) as address, linked(address) as link:
        link.on_change = lambda: changes.append(link.draining)
        await eventually(lambda: replica.num_open == 1, "the stream is open")
        call = send(link)
        await replica.say(draining=common_pb2.DrainNotice(deadline_s=5))
        await eventually(lambda: link.draining, "draining")
        assert changes == [True]
        await replica.reply(call.call_id)
        await call.next(5.0)
    replica.draining = True
    async with serving(replica) as address, linked(address) as link:
        assert link.draining


async def test_hung_device_is_told_from_a_slow_one() -> None:
    """Iterations that move keep a link alive; a device that stands still with work does not."""
    replica = FakeReplica()
    now = [0.0]
    async with (
        serving(replica) as address,
        linked(address, heartbeat_s=0.02, hang_s=2.0, clock=lambda: now[0]) as link,
    ):
        await eventually(lambda: replica.num_open == 1, "the stream is open")
        now[0] = 100.0
        call = send(link)
        await eventually(lambda: len(replica.heartbeats) >= 2, "heartbeats go out")
        assert link.connected, "an idle device may stand still"
        for iteration in range(1, 5):
            now[0] += 1.9
            await replica.say(load=common_pb2.Load(num_iterations=iteration))
            await eventually(
                lambda n=iteration: link.load and link.load.num_iterations == n, "load came"
            )
        count = len(replica.heartbeats)
        await eventually(lambda: len(replica.heartbeats) > count + 2, "more heartbeats")
        assert link.connected
        assert not call.closed
        now[0] += 2.1
        with pytest.raises(PeerUnavailable, match="stands still"):
            await call.next(5.0)
        assert not link.connected
        assert not link.is_returning
        await replica.say(load=common_pb2.Load(num_iterations=9))
        await eventually(lambda: link.connected, "it moves again")


async def test_sessions_that_a_device_hangs_in_are_told_from_those_that_wait() -> None:
    """The replica says what it has been computing for long; that may be what it hangs of."""
    replica = FakeReplica()
    now = [0.0]
    async with (
        serving(replica) as address,
        linked(address, heartbeat_s=0.02, hang_s=2.0, clock=lambda: now[0]) as link,
    ):
        await eventually(lambda: replica.num_open == 1, "the stream is open")
        stuck, waiting = send(link, "stuck"), send(link, "waiting")
        load = common_pb2.Load(num_iterations=1, stuck_session_ids=["stuck", "others"])
        await replica.say(load=load)
        await eventually(lambda: link.load is not None and link.load.stuck, "the load came")
        now[0] += 2.1
        with pytest.raises(DeviceDied) as caught:
            await stuck.next(5.0)
        assert caught.value.args == ("stuck", 2)
        with pytest.raises(PeerUnavailable, match="stands still"):
            await waiting.next(5.0)


async def test_heartbeat_lists_the_sessions_still_owned() -> None:
    """A lease is renewed for what is held, and for nothing released."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address, heartbeat_s=0.02) as link:
        send(link, "a")
        send(link, "b")
        await eventually(lambda: {"a", "b"} in replica.heartbeats, "both are renewed")
        link.release("a")
        await eventually(lambda: {"b"} in replica.heartbeats, "one is renewed")
        released = [r.session_id for frame in replica.frames for r in frame.releases]
        assert released == ["a"]


async def test_release_is_sent_once() -> None:
    """A second release, or one of an unknown session, says nothing."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address) as link:
        send(link, "a")
        for session_id in ("a", "a", "unknown"):
            link.release(session_id)
        send(link, "b")
        await eventually(lambda: len(replica.calls) == 2, "both calls came")
        released = [r.session_id for frame in replica.frames for r in frame.releases]
        assert released == ["a"]


async def test_call_given_up_before_it_left_is_never_sent() -> None:
    """Cancelled in the turn of its start: no call, no cancel, and a release that acts first."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address) as link:
        await eventually(lambda: replica.num_open == 1, "the stream is open")
        replica.frames.clear()
        gone = send(link, "s")
        link.cancel(gone.call_id)
        link.release("s")
        again = send(link, "s")
        await eventually(lambda: replica.calls, "a call came")
        assert [session.call_id for session in replica.calls] == [again.call_id]
        assert not any(frame.cancels for frame in replica.frames)
        released = [r.session_id for frame in replica.frames for r in frame.releases]
        assert released == ["s"]


async def test_reply_of_a_call_given_up_is_dropped_B077() -> None:
    """It finds nobody, and harms nobody."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address) as link:
        gone = send(link, "a")
        await eventually(lambda: replica.calls, "the call came")
        link.cancel(gone.call_id)
        other = send(link, "b")
        await eventually(lambda: len(replica.calls) == 2, "both calls came")
        assert [c.call_id for frame in replica.frames for c in frame.cancels] == [gone.call_id]
        await replica.reply(gone.call_id, 12_345, other.call_id)
        await other.next(5.0)
        assert gone.poll() is None


async def test_hurried_call_is_still_awaited() -> None:
    """A late proposal is asked to stop early; its reply still says what the draft holds."""
    replica = FakeReplica()
    async with serving(replica) as address, linked(address) as link:
        call = send(link)
        await eventually(lambda: replica.calls, "the call came")
        link.hurry(call.call_id)
        await eventually(lambda: any(frame.cancels for frame in replica.frames), "hurried")
        await replica.reply(call.call_id)
        assert (await call.next(5.0)).call_id == call.call_id


async def test_closing_writes_the_last_releases_and_ends_the_stream_B187() -> None:
    """No session is left to its lease, and no call stays open on the server."""
    replica = FakeReplica()
    async with serving(replica) as address:
        async with linked(address) as link:
            call = send(link, "a")
            await eventually(lambda: replica.calls, "the call came")
            link.cancel(call.call_id)
            link.release("a")
        await eventually(lambda: replica.num_open == 0, "the stream has ended")
        released = [r.session_id for frame in replica.frames for r in frame.releases]
        assert released == ["a"]


async def test_link_to_nobody_keeps_trying() -> None:
    """A replica that starts later is found."""
    replica = FakeReplica()
    async with serving(FakeReplica()) as address:
        pass
    link: DraftLink = FrameLink(DRAFT_KIND, address, heartbeat_s=30, hang_s=30)
    link.start()
    async with serving(replica, port=int(address.rpartition(":")[2])):
        await eventually(lambda: link.connected, "found")
        await link.close()
    assert replica.num_open == 0
