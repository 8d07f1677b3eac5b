"""How a session moves between targets: when, in which order, and what is sent to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from specserve.errors import CapacityExhausted, PeerUnavailable
from specserve.orchestrator.pool import TARGET_KIND, Pool, TargetLink
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.target_call import Scored
from specserve.orchestrator.target_departure import STAY_S
from specserve.orchestrator.target_session import TargetSession
from specserve.rpc import codec, status
from specserve.rpc.pending import PendingCall
from specserve.rpc.v1 import common_pb2, target_pb2
from specserve.speculation.digest import TokenChain
from specserve.speculation.types import (
    AcceptanceRule,
    Proposal,
    SamplingParams,
    TargetScores,
    Verification,
)

NOTHING = Proposal((), None)
Answer = Callable[[target_pb2.VerifyCall], target_pb2.VerifyReply]


class FakeLink:
    """A replica that is answered for by the test; notes what it is sent."""

    def __init__(self, address: str, said: list[tuple[str, str]]) -> None:
        self.address = address
        self.model = common_pb2.GetModelResponse(replica_id=address)
        self.load = None
        self.connected = True
        self.draining = False
        self.retired = False
        self.is_returning = False
        self.sessions: set[str] = set()
        self.calls: list[target_pb2.VerifyCall] = []
        self.pending: list[PendingCall[target_pb2.VerifyCall, target_pb2.VerifyReply]] = []
        self.answer: Answer | None = one_token
        self._said = said

    def next_call_id(self) -> int:
        return len(self.calls) + 1

    def send(self, call: Any, call_id: int, *, streaming: bool = False) -> Any:
        pending = PendingCall(call, call_id, streaming=streaming)
        self.calls.append(call)
        self.pending.append(pending)
        self._said.append((self.address, "call"))
        if self.answer is not None:
            reply = self.answer(call)
            pending.put(reply, last=not reply.more_follows)
        return pending

    def cancel(self, call_id: int) -> None:
        self._said.append((self.address, "cancel"))

    def release(self, session_id: str) -> None:
        if session_id in self.sessions:
            self.sessions.discard(session_id)
            self._said.append((self.address, "release"))


def one_token(call: target_pb2.VerifyCall) -> target_pb2.VerifyReply:
    """Answer with a token, as a target that holds what the call says."""
    session = call.session
    return target_pb2.VerifyReply(
        call_id=session.call_id,
        cached_length=session.keep_length + len(session.append_token_ids) // 4,
        replacement_token_ids=codec.pack_ids((9,)),
        more_follows=call.num_decode_steps > 1,
    )


def refuse(call: target_pb2.VerifyCall) -> target_pb2.VerifyReply:
    """Have no room."""
    error = status.to_call_error(CapacityExhausted("KV blocks", 3, 1))
    return target_pb2.VerifyReply(call_id=call.session.call_id, error=error)


class Setup:
    """One request's session, two targets to choose from, a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[tuple[str, str]] = []
        self.old, self.new = FakeLink("old", self.said), FakeLink("new", self.said)
        self.new.connected = False  # until a test wants it
        self.pool: Pool[target_pb2.VerifyCall, target_pb2.VerifyReply] = Pool(
            TARGET_KIND, heartbeat_s=1.0, hang_s=1.0
        )
        for link in (self.old, self.new):
            self.pool.links[link.address] = cast(TargetLink, link)
            self.pool.approved.add(link.address)
        sampling = SamplingParams(AcceptanceRule.GREEDY, 0, 0, temperature=0.0)
        self.state = RequestState("r", "s", sampling, 3, 100, 1000, 4, TokenChain((5, 6, 7)))
        self.session = TargetSession(
            self.state,
            self.pool,
            common_pb2.SessionOpening(),
            call_timeout_s=5.0,
            reopen_timeout_s=5.0,
            clock=lambda: self.now,
        )

    async def round(self, num_decode_steps: int = 1) -> Scored:
        """Verify nothing and commit the token that comes."""
        scored = await self.session.verify(NOTHING, num_decode_steps, "")
        self.commit(scored.scores)
        return scored

    def commit(self, scores: TargetScores) -> None:
        self.state.commit(NOTHING, Verification(0, scores.replacement_token_ids[0]))
        self.session.settle()

    def drain_old(self) -> None:
        """Let the old target drain while the new one is there."""
        self.old.draining = self.new.connected = True
        self.said.clear()


async def test_draining_replica_is_let_go_once_another_has_answered() -> None:
    """First the call elsewhere, with everything committed; the release only after its answer."""
    setup = Setup()
    await setup.round()
    await setup.round()
    setup.drain_old()
    setup.new.answer = None
    moving = asyncio.create_task(setup.round())
    await asyncio.sleep(0)
    assert setup.said == [("new", "call")]
    assert setup.old.sessions == {"s"}
    session = setup.new.calls[0].session
    assert (session.epoch, session.step, session.keep_length) == (2, 1, 0)
    assert codec.unpack_ids(session.append_token_ids, "ids") == (5, 6, 7, 9, 9)
    assert session.HasField("opening")
    setup.new.pending[0].put(one_token(setup.new.calls[0]), last=True)
    await moving
    assert setup.said == [("new", "call"), ("old", "release")]
    assert setup.session.num_reopens == 1
    setup.new.answer = one_token
    await setup.round()
    assert setup.said[2:] == [("new", "call")]
    assert setup.session.num_reopens == 1


async def test_draining_replica_is_kept_where_there_is_no_other() -> None:
    """A session that has nowhere to go goes on where it is."""
    setup = Setup()
    await setup.round()
    setup.old.draining = True
    await setup.round()
    assert setup.said == [("old", "call")] * 2
    assert setup.session.num_reopens == 0


async def test_decode_ahead_is_given_up_to_leave_a_draining_replica() -> None:
    """It does not run on for hundreds of tokens: the next token is asked for elsewhere."""
    setup = Setup()
    assert (await setup.round(num_decode_steps=256)).more_follows
    setup.drain_old()
    with pytest.raises(PeerUnavailable, match="old drains"):
        await setup.session.next_token()
    await setup.round()
    assert setup.said == [("old", "cancel"), ("new", "call"), ("old", "release")]


def ahead(call: target_pb2.VerifyCall, number: int) -> target_pb2.VerifyReply:
    """Make the reply of decode-ahead that carries its token `number`, 60 + number."""
    reply = one_token(call)
    reply.cached_length += number
    reply.replacement_token_ids = codec.pack_ids((60 + number,))
    return reply


async def test_token_of_decode_ahead_that_comes_twice_is_committed_once() -> None:
    """A reply repeated on its way, at once or later, adds nothing."""
    setup = Setup()
    setup.old.answer = lambda call: ahead(call, 0)
    await setup.round(num_decode_steps=256)
    for number in (0, 0, 1, 1, 0, 2):
        setup.old.pending[0].put(ahead(setup.old.calls[0], number), last=False)
    for _ in range(2):
        setup.commit((await setup.session.next_token()).scores)
    assert setup.state.chain.tokens == [5, 6, 7, 60, 61, 62]


@pytest.mark.parametrize("order", [(2, 1), (2, 2), (3,)])
async def test_token_of_decode_ahead_that_is_missing_ends_it(order: tuple[int, ...]) -> None:
    """Out of order, or lost: what came too early is not committed, and the next round asks the same
    replica to go on behind what is."""
    setup = Setup()
    setup.old.answer = lambda call: ahead(call, 0)
    await setup.round(num_decode_steps=256)
    for number in order:
        setup.old.pending[0].put(ahead(setup.old.calls[0], number), last=False)
    with pytest.raises(PeerUnavailable, match="came before"):
        await setup.session.next_token()
    await setup.round()
    assert setup.state.chain.tokens == [5, 6, 7, 60, 60]
    assert setup.said == [("old", "call"), ("old", "cancel"), ("old", "call")]
    assert setup.session.num_reopens == 0


async def test_stream_that_is_cut_before_the_first_token_costs_no_prefill() -> None:
    """The call goes out again in the same session: what was computed of the prompt is there."""
    setup = Setup()
    setup.old.answer = None
    beginning = asyncio.create_task(setup.round(num_decode_steps=256))
    await asyncio.sleep(0)
    setup.new.connected = True
    setup.old.connected, setup.old.is_returning, setup.old.answer = False, True, one_token
    setup.old.pending[0].fail(PeerUnavailable("target", "connection lost"))
    await beginning
    assert setup.said == [("old", "call")] * 2
    first, again = (call.session for call in setup.old.calls)
    assert (again.epoch, again.step) == (first.epoch, first.step + 1)
    assert again.append_token_ids == first.append_token_ids
    assert setup.session.num_reopens == 0


async def test_stream_that_does_not_come_back_is_waited_for_no_longer() -> None:
    """The session is opened elsewhere, as after any loss."""
    setup = Setup()
    setup.old.answer = None
    beginning = asyncio.create_task(setup.round(num_decode_steps=256))
    await asyncio.sleep(0)
    setup.old.connected, setup.new.connected = False, True
    setup.old.pending[0].fail(PeerUnavailable("target", "connection lost"))
    await beginning
    assert [address for address, what in setup.said if what == "call"] == ["old", "new"]


async def test_stream_that_comes_and_goes_is_not_waited_for_for_ever() -> None:
    """What is always about to come back counts as gone in the end."""
    setup = Setup()
    setup.old.answer = None
    beginning = asyncio.create_task(setup.round(num_decode_steps=256))
    for number in range(3):
        await asyncio.sleep(0)
        setup.old.connected, setup.old.is_returning = False, True
        setup.now += 2.0
        setup.old.pending[number].fail(PeerUnavailable("target", "connection lost"))
    with pytest.raises(PeerUnavailable):
        await beginning


async def test_refused_move_is_undone() -> None:
    """The old session goes on, neither reopened nor counted; others are asked again after a while,
    and never with an epoch that was used before."""
    setup = Setup()
    await setup.round()
    setup.drain_old()
    setup.new.answer = refuse
    await setup.round()
    assert setup.said == [("new", "call"), ("new", "release"), ("old", "call")]
    session = setup.old.calls[-1].session
    assert (session.epoch, session.step, session.keep_length) == (1, 2, 3)
    assert not session.HasField("opening")
    assert setup.session.num_reopens == 0
    await setup.round()
    assert setup.said[3:] == [("old", "call")]
    setup.now += STAY_S
    setup.new.answer = one_token
    await setup.round()
    assert setup.said[4:] == [("new", "call"), ("old", "release")]
    assert [call.session.epoch for call in setup.new.calls] == [2, 3]
    assert setup.session.num_reopens == 1


async def test_refused_move_from_a_replica_that_is_gone_meanwhile_goes_on_elsewhere() -> None:
    """There is nothing to return to: the session is opened anew, as after any loss."""
    setup = Setup()
    await setup.round()
    setup.drain_old()

    def refuse_once(call: target_pb2.VerifyCall) -> target_pb2.VerifyReply:
        setup.old.connected = False
        setup.new.answer = one_token
        return refuse(call)

    setup.new.answer = refuse_once
    await setup.round()
    assert [call.session.epoch for call in setup.new.calls] == [2, 3]
    assert setup.old.sessions == set()
    assert setup.new.sessions == {"s"}


async def test_request_that_ends_in_mid_move_is_freed_on_both() -> None:
    """Cancelling while the other target is still asked leaves no session anywhere."""
    setup = Setup()
    await setup.round()
    setup.drain_old()
    setup.new.answer = None
    moving = asyncio.create_task(setup.round())
    await asyncio.sleep(0)
    moving.cancel()
    await asyncio.gather(moving, return_exceptions=True)
    setup.session.close()
    setup.session.close()
    assert setup.said[1:] == [("old", "release"), ("new", "cancel"), ("new", "release")]
    assert setup.old.sessions == setup.new.sessions == set()
