"""What one request's session makes of a draft's answers, and of a draft that it does not need."""

from __future__ import annotations

from typing import Any, cast

import pytest

from specserve.errors import (
    CacheMismatch,
    CapacityExhausted,
    DeviceDied,
    SessionNotFound,
    SpecServeError,
)
from specserve.orchestrator.draft_session import DraftSession
from specserve.orchestrator.pool import DRAFT_KIND, DraftLink, Pool
from specserve.orchestrator.proposer import Drafted
from specserve.orchestrator.request_state import RequestState
from specserve.rpc import codec, status
from specserve.rpc.pending import PendingCall
from specserve.rpc.v1 import common_pb2, draft_pb2
from specserve.speculation.digest import TokenChain
from specserve.speculation.types import AcceptanceRule, SamplingParams

Reply = draft_pb2.ProposeReply


class FakeLink:
    """A draft whose next answer the test sets."""

    address = "draft"
    load = None
    connected = True
    draining = retired = is_returning = False

    def __init__(self) -> None:
        self.model = common_pb2.GetModelResponse(replica_id="draft")
        self.sessions: set[str] = set()
        self.released: list[str] = []
        self.reply = Reply()

    def next_call_id(self) -> int:
        return 1

    def send(self, call: Any, call_id: int) -> Any:
        pending = PendingCall(call, call_id, streaming=False)
        pending.put(self.reply, last=True)
        return pending

    def cancel(self, call_id: int) -> None:
        """Nothing is in flight."""

    def release(self, session_id: str) -> None:
        self.sessions.discard(session_id)
        self.released.append(session_id)


class Setup:
    """One request's session on a draft."""

    def __init__(self) -> None:
        self.link = FakeLink()
        pool: Pool[draft_pb2.ProposeCall, Reply] = Pool(DRAFT_KIND, heartbeat_s=1.0, hang_s=1.0)
        pool.links["draft"] = cast(DraftLink, self.link)
        pool.approved.add("draft")
        sampling = SamplingParams(AcceptanceRule.GREEDY, 0, 0, temperature=0.0)
        self.state = RequestState("r", "s", sampling, 3, 100, 1000, 4, TokenChain((5, 6, 7)))
        opening = common_pb2.SessionOpening()
        self.session = DraftSession(self.state, pool, opening, timeout_s=5.0, clock=lambda: 0.0)

    async def propose(self, reply: Reply) -> Drafted:
        self.link.reply = reply
        assert self.session.ready()
        return await self.session.propose(4, "")


def drafting(*token_ids: int) -> Reply:
    """Answer with these tokens."""
    return Reply(cached_length=3, draft_token_ids=codec.pack_ids(token_ids))


@pytest.mark.parametrize(
    "error",
    [SessionNotFound("s"), CapacityExhausted("KV blocks", 3, 1), DeviceDied("s", 1)]
    + [CacheMismatch(3, 0)],
)
async def test_an_answer_that_is_an_error_is_not_the_drafts_silence(error: SpecServeError) -> None:
    """Else a restart would teach that texts are not worth drafting."""
    setup = Setup()
    failed = await setup.propose(Reply(error=status.to_call_error(error)))
    assert (failed.proposal.draft_token_ids, failed.timing) == ((), None)


async def test_a_wrong_proposal_is_not_the_drafts_silence() -> None:
    setup = Setup()
    wrong = await setup.propose(drafting(1, 2, 3, 4, 5))
    assert (wrong.proposal.draft_token_ids, wrong.timing) == ((), None)
    assert setup.session.num_invalid == 1


@pytest.mark.parametrize("token_ids", [(), (8, 9)])
async def test_what_a_draft_says_has_its_time(token_ids: tuple[int, ...]) -> None:
    """Nothing to say is an answer too."""
    setup = Setup()
    drafted = await setup.propose(drafting(*token_ids))
    assert drafted.proposal.draft_token_ids == token_ids
    assert drafted.timing is not None


async def test_rest_frees_the_session_and_it_may_be_opened_anew() -> None:
    setup = Setup()
    setup.session.rest()
    assert setup.link.released == []
    await setup.propose(drafting(8))
    setup.session.rest()
    setup.session.rest()
    assert setup.link.released == ["s"]
    assert setup.session.num_behind == 3
    assert (await setup.propose(drafting(8))).proposal.draft_token_ids == (8,)
    assert setup.state.draft.epoch > 1
