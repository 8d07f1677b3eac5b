"""One request's session on a draft: attach, propose, catch up, re-attach.

Draft trouble of any sort means a round without draft tokens, never an error. Knows the draft's
messages; knows no acceptance.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from specserve.errors import CacheMismatch, DeviceDied, InvalidProposal, SpecServeError
from specserve.orchestrator.pool import DraftLink, Pool
from specserve.orchestrator.proposer import EMPTY_PROPOSAL, NOTHING_DRAFTED, Drafted
from specserve.orchestrator.request_state import CallPlan, RequestState
from specserve.orchestrator.request_trace import LATE
from specserve.rpc import codec, status
from specserve.rpc.pending import PendingCall
from specserve.rpc.v1 import common_pb2, draft_pb2
from specserve.speculation.acceptance import draft_token_probs
from specserve.speculation.types import AcceptanceRule, Proposal

logger = logging.getLogger(__name__)

REATTACH_S = 0.5
"""Pause before a session that lost its draft tries another."""


NUM_STEPS_WITHOUT_DRAFT = 4
"""Tokens decoded ahead while a draft is late or lost: few, so that it is soon asked again."""


class DraftSession:
    """The draft side of one request (a `Proposer`)."""

    num_steps_without = NUM_STEPS_WITHOUT_DRAFT

    def __init__(
        self,
        state: RequestState,
        pool: Pool[draft_pb2.ProposeCall, draft_pb2.ProposeReply],
        opening: common_pb2.SessionOpening,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.link: DraftLink | None = None
        self.num_late = 0
        """Proposals that missed their round."""
        self.num_invalid = 0
        """Proposals that contradicted themselves and were not used."""
        self.catch_up_s = 0.0
        """Seconds of a device that the last catching up took."""
        self._state = state
        self._pool = pool
        self._opening = opening
        self._timeout_s = timeout_s
        self._clock = clock
        self._pending: PendingCall[draft_pb2.ProposeCall, draft_pb2.ProposeReply] | None = None
        self._plan: CallPlan | None = None
        self._sent_at = 0.0
        self._num_asked = 0
        self._token_probs: tuple[float, ...] | None = None
        self._unread: tuple[CallPlan, int, tuple[int, ...]] | None = None
        """The last reply: its call, the length it named, the tokens drafted."""
        self._retry_at = 0.0

    @property
    def max_model_len(self) -> int:
        """Longest sequence the attached draft takes; 0 means no limit."""
        return self.link.model.max_model_len if self.link and self.link.model else 0

    @property
    def is_busy(self) -> bool:
        """Whether a call is in flight."""
        return self._pending is not None

    @property
    def num_behind(self) -> int:
        """Committed tokens whose KV the draft is not known to hold."""
        return self._state.committed_length - self._state.draft.cached_length

    def ready(self) -> bool:
        """Say whether a call can be sent: none is in flight, and a draft is attached."""
        self._absorb_finished()  # a late proposal, a long prompt
        return self._pending is None and self._attach()

    def catch_up(self, traceparent: str) -> bool:
        """Let the draft append what is committed, without waiting for it; False without one."""
        # With two tokens left the first round leaves one, and one needs no draft.
        if self._state.num_remaining_tokens < 3 or not self.ready():
            return False
        if self.max_model_len and self._state.committed_length >= self.max_model_len:
            return False
        self._start(0, traceparent)
        return True

    async def caught_up(self, timeout_s: float) -> None:
        """Wait for the answer of a call that nobody waited for, such as one with the prompt."""
        if self._pending is not None:
            with contextlib.suppress(TimeoutError):
                await self._pending.wait(timeout_s)

    async def propose(self, num_speculative_tokens: int, traceparent: str) -> Drafted:
        """Append what is committed and draft; empty when it is late, lost or wrong."""
        self._start(num_speculative_tokens, traceparent)
        return await self._collect()

    def _attach(self) -> bool:
        """Have a usable draft; False means target-only for now."""
        link = self.link
        if link is not None:
            if self._pool.may_use(link) and not (
                link.draining and self._pool.successor(link, self._state.demand)
            ):
                return True
            if link.is_returning:
                return False  # what it holds is worth a few target-only rounds
            self._detach()
        if self._clock() < self._retry_at or self._state.draft_deaths.is_proven:
            return False
        # A draft that is full has better be left alone: it would take another session's blocks.
        self.link = self._pool.choose(self._state.demand, must_fit=True)
        if self.link is None:
            self._retry_at = self._clock() + REATTACH_S
        return self.link is not None

    def _start(self, num_speculative_tokens: int, traceparent: str) -> None:
        """Send a call: append what is committed, then draft K tokens (0 only appends)."""
        if self.link is None or self._pending is not None:
            return
        state = self._state
        plan = state.plan_call(state.draft, codec.MAX_APPEND_TOKENS)
        if plan.committed_length < state.committed_length:
            # A prompt of several pieces: this call appends one; the next round sends the next.
            num_speculative_tokens = 0
        call_id = self.link.next_call_id()
        call = draft_pb2.ProposeCall(
            session=common_pb2.SessionCall(
                call_id=call_id,
                session_id=state.session_id,
                epoch=plan.epoch,
                step=plan.step,
                keep_length=plan.keep_length,
                keep_digest=plan.keep_digest,
                append_token_ids=codec.pack_ids(plan.append_token_ids),
                opening=self._opening if plan.opens else None,
                timeout_s=self._timeout_s,
                traceparent=traceparent,
                alone=state.draft_deaths.runs_alone,
            ),
            num_speculative_tokens=num_speculative_tokens,
        )
        self.link.sessions.add(state.session_id)
        self._plan = plan
        self._num_asked = num_speculative_tokens
        self._unread = None
        self._sent_at = self._clock()
        self._pending = self.link.send(call, call_id)
        state.trace.chores.call_sent()

    async def _collect(self) -> Drafted:
        """Wait for the proposal; an empty one when it is late, lost or wrong."""
        pending = self._pending
        began = self._clock()
        if pending is None:
            return NOTHING_DRAFTED
        try:
            reply = await pending.next(self._timeout_s)
        except TimeoutError:
            self.num_late += 1
            self._write_down(error=LATE)
            if self.link is not None:
                # The draft stops before its next token; its append completes and is reported.
                self.link.hurry(pending.call_id)
            return self._drafted(EMPTY_PROPOSAL, None, began)
        except SpecServeError as error:
            self._write_down(error=type(error).__name__)
            self._on_error(error)
            return self._drafted(EMPTY_PROPOSAL, None, began)
        self._write_down(reply)
        proposal = self._take(reply)
        # An answer that could not be used is none: the draft did not say that it knows nothing.
        timing = reply.timing if self._unread is not None else None
        return self._drafted(proposal, timing, began)

    def _drafted(
        self, proposal: Proposal, timing: common_pb2.CallTiming | None, began: float
    ) -> Drafted:
        token_probs = self._token_probs if proposal.draft_token_ids else None
        wait_s = self._clock() - began
        return Drafted(proposal, token_probs, timing, wait_s, "draft_model")

    def _absorb_finished(self) -> None:
        """Take a late reply: it moves cached_length; its draft tokens are of no use any more."""
        if self._pending is None:
            return
        try:
            reply = self._pending.poll()
        except SpecServeError as error:
            self._write_down(error=type(error).__name__, is_background=True)
            self._on_error(error)
            return
        if reply is not None:
            self._write_down(reply, is_background=True)
            if self._num_asked == 0:
                self.catch_up_s = reply.timing.forward_s
            self._take(reply)

    def _write_down(
        self,
        reply: draft_pb2.ProposeReply | None = None,
        *,
        error: str = "",
        is_background: bool = False,
    ) -> None:
        """Note the call in flight, which has ended or is waited for no longer."""
        if self.link is None or self._plan is None:
            return
        answered = reply is not None and not reply.HasField("error")
        self._state.trace.note_call(
            "draft",
            self.link,
            self._sent_at,
            epoch=self._plan.epoch,
            timing=reply.timing if reply is not None and answered else None,
            num_replies=int(answered),
            error=error if reply is None or answered else reply.error.error,
            is_background=is_background,
        )

    def _take(self, reply: draft_pb2.ProposeReply) -> Proposal:
        state, plan = self._state, self._plan
        self._pending = None
        if plan is None:
            return EMPTY_PROPOSAL
        if reply.HasField("error"):
            self._on_error(status.from_call_error(reply.error, state.request_id, plan.keep_length))
            return EMPTY_PROPOSAL
        try:
            drafted = codec.unpack_ids(reply.draft_token_ids, "draft_token_ids")
            probs = codec.unpack_probs(
                reply.support_size, reply.support_token_ids, reply.support_weights, len(drafted)
            )
            proposal = Proposal(drafted, probs)
            # Checked before the target sees it: a wrong proposal must never cost the request.
            if len(drafted) > self._num_asked:
                raise InvalidProposal(f"{len(drafted)} tokens, {self._num_asked} were asked for")
            is_standard = state.sampling.rule is AcceptanceRule.STANDARD
            self._token_probs = (
                tuple(draft_token_probs(proposal)) if drafted and is_standard else None
            )
        except SpecServeError as error:
            logger.warning("draft %s sent a wrong proposal: %s", self._address, error)
            self.num_invalid += 1
            self._on_error(error)
            return EMPTY_PROPOSAL
        self._unread = (plan, reply.cached_length, drafted)
        self.settle()
        if drafted:
            state.draft_deaths.note_progress()
        return proposal

    def settle(self) -> None:
        """Move the draft's cached_length by its last reply, as far as it has been committed."""
        if self._unread is not None:
            plan, cached_length, drafted = self._unread
            self._state.absorb(self._state.draft, plan, cached_length, drafted)

    @property
    def _address(self) -> str:
        return self.link.address if self.link else "(none)"

    def _on_error(self, error: SpecServeError) -> None:
        self._pending = None
        self._unread = None
        if isinstance(error, CacheMismatch):
            self._state.correct(self._state.draft, error.matching_length)
            return
        if isinstance(error, DeviceDied):
            self._blame(error)
        logger.info("request %s leaves draft %s: %s", self._state.request_id, self._address, error)
        self._detach()
        self._retry_at = self._clock() + REATTACH_S

    def _blame(self, error: DeviceDied) -> None:
        """Ask no draft any more if drafts' devices die of this request."""
        deaths = self._state.draft_deaths
        deaths.note_death(error.num_computed)
        if deaths.is_proven:
            self._pool.condemn(self._state.session_id)
            logger.error(
                "request %s goes on without a draft: %d devices of drafts died while they computed "
                "it, the last one while it computed nothing else",
                self._state.request_id,
                deaths.count,
            )

    def rest(self) -> None:
        """Free the session's KV until it is wanted again. Idempotent."""
        if self.link is not None and self._state.session_id in self.link.sessions:
            self._detach()

    def _detach(self) -> None:
        self.close()
        self._unread = None
        self._state.draft.reopen()

    def close(self) -> None:
        """Give up what is in flight and free the session. Idempotent."""
        if self._state.target_deaths.is_proven:
            # Found out on targets before drafts had shown it: those that died are not ill either.
            self._pool.condemn(self._state.session_id)
        if self.link is None:
            return
        if self._pending is not None:
            self.link.cancel(self._pending.call_id)
        self.link.release(self._state.session_id)
        self.link = None
        self._pending = None
