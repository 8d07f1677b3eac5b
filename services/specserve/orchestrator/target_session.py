"""One request's session on a target: open, verify, decode ahead, reopen elsewhere.

Target trouble means the same call on another replica from the committed tokens. Knows the target's
messages; accepts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specserve.errors import (
    CacheMismatch,
    CapacityExhausted,
    Draining,
    PeerUnavailable,
    Preempted,
    SessionNotFound,
    SpecServeError,
    StaleStep,
)
from specserve.orchestrator.pool import Pool, TargetLink
from specserve.orchestrator.request_state import CallPlan, RequestState
from specserve.rpc import codec, status
from specserve.rpc.pending import PendingCall
from specserve.rpc.v1 import common_pb2, target_pb2
from specserve.speculation.types import Proposal, TargetScores

logger = logging.getLogger(__name__)

_MOVE = (PeerUnavailable, SessionNotFound, Preempted, Draining, StaleStep, CapacityExhausted)
"""Errors after which the session is opened anew, on another replica where there is one."""

RETRY_PAUSE_S = 0.1
"""Pause before a session asks again for blocks, or a replica that it has just left."""

MAX_MISMATCHES = 3
"""Cache mismatches in a row after which the session is opened anew."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a round, or one token of decode-ahead, got from its target."""

    scores: TargetScores
    logprobs: target_pb2.RowLogprobs | None
    timing: common_pb2.CallTiming
    more_follows: bool
    wait_s: float


class TargetSession:
    """The target side of one request."""

    def __init__(
        self,
        state: RequestState,
        pool: Pool[target_pb2.VerifyCall, target_pb2.VerifyReply],
        opening: common_pb2.SessionOpening,
        *,
        call_timeout_s: float,
        reopen_timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.link: TargetLink | None = None
        self.num_reopens = 0
        self.cached_prompt_tokens = 0
        """Prompt tokens found in the prefix cache when the session was first opened."""
        self._state = state
        self._pool = pool
        self._opening = opening
        self._call_timeout_s = call_timeout_s
        self._reopen_timeout_s = reopen_timeout_s
        self._clock = clock
        self._pending: PendingCall[target_pb2.VerifyCall, target_pb2.VerifyReply] | None = None
        self._plan: CallPlan | None = None
        self._drafted: tuple[int, ...] = ()
        self._decoded: tuple[int, ...] = ()
        self._unread: tuple[int, tuple[int, ...]] | None = None
        """The last reply: the length it named, the tokens held beyond the call's committed ones."""
        self._sent_at = 0.0

    async def verify(self, proposal: Proposal, num_decode_steps: int, traceparent: str) -> Scored:
        """Score a proposal, or begin to decode ahead (then `next_token` gives the rest).

        Cancelling leaves a call in flight; `close` gives it up.

        Raises:
            PeerUnavailable: no target answered within the reopen timeout.
            SpecServeError: the request itself cannot go on (NonFiniteLogits, InvalidProposal).
        """
        avoid: set[str] = set()
        mismatches = 0
        deadline = None if self.link is not None else self._clock() + self._reopen_timeout_s
        while True:
            try:
                await self._attach(avoid, deadline)
                await self._append_pieces(traceparent)
                self._send(proposal, num_decode_steps, traceparent)
                return await self._receive(len(proposal.draft_token_ids))
            except CacheMismatch as error:
                mismatches += 1
                self._state.correct(self._state.target, error.matching_length)
                if mismatches >= MAX_MISMATCHES:
                    self._state.target.reopen()
            except _MOVE as error:
                if deadline is None:
                    deadline = self._clock() + self._reopen_timeout_s
                elif self._clock() >= deadline:
                    raise
                await self._leave(error, avoid)

    async def next_token(self) -> Scored:
        """Wait for the next token of decode-ahead.

        Raises:
            PeerUnavailable: the replica was lost; begin a new round from what is committed.
        """
        try:
            return await self._receive(0)
        except _MOVE as error:
            link = self.link
            is_there = link is not None and (link.connected or link.is_returning)
            if isinstance(error, PeerUnavailable) and is_there:
                # The stream was cut; the replica and what it holds may well be there still.
                self._pending = None
                raise
            await self._leave(error, set())
            raise PeerUnavailable("target", str(error)) from error

    def settle(self) -> None:
        """Move the target's cached_length by its last reply, as far as it has been committed."""
        if self._plan is not None and self._unread is not None:
            cached_length, drafted = self._unread
            self._state.absorb(self._state.target, self._plan, cached_length, drafted)

    def give_up_decode_ahead(self) -> None:
        """Stop a decode-ahead whose further tokens are not wanted."""
        if self._pending is not None and self.link is not None:
            self.link.cancel(self._pending.call_id)
        self._pending = None

    def close(self) -> None:
        """Give up what is in flight and free the session. Idempotent."""
        if self.link is None:
            return
        if self._pending is not None:
            self.link.cancel(self._pending.call_id)
        self.link.release(self._state.session_id)
        self.link = None
        self._pending = None

    async def _attach(self, avoid: set[str], deadline: float | None) -> None:
        if self.link is not None:
            return
        left = self._reopen_timeout_s if deadline is None else max(0.0, deadline - self._clock())
        self.link = await self._pool.wait_for_one(left, avoid)
        if self.link is None:
            raise PeerUnavailable("target", f"no replica was usable for {self._reopen_timeout_s} s")

    async def _append_pieces(self, traceparent: str) -> None:
        """Send all but the last piece of a prompt that is too long for one call."""
        state = self._state
        while state.committed_length - state.target.cached_length > codec.MAX_APPEND_TOKENS:
            self._send(Proposal((), None), 1, traceparent, append_only=True)
            await self._receive(0)
            self.settle()

    def _send(
        self,
        proposal: Proposal,
        num_decode_steps: int,
        traceparent: str,
        *,
        append_only: bool = False,
    ) -> None:
        link, state = self.link, self._state
        if link is None:
            raise PeerUnavailable("target", "no replica")
        plan = state.plan_call(state.target, codec.MAX_APPEND_TOKENS)
        size, ids, weights = codec.pack_probs(proposal.draft_probs)
        call_id = link.next_call_id()
        call = target_pb2.VerifyCall(
            session=common_pb2.SessionCall(
                call_id=call_id,
                session_id=state.session_id,
                epoch=plan.epoch,
                step=plan.step,
                keep_length=plan.keep_length,
                keep_digest=plan.keep_digest,
                append_token_ids=codec.pack_ids(plan.append_token_ids),
                opening=self._opening if plan.opens else None,
                timeout_s=self._call_timeout_s,
                traceparent=traceparent,
            ),
            draft_token_ids=codec.pack_ids(proposal.draft_token_ids),
            support_size=size,
            support_token_ids=ids,
            support_weights=weights,
            num_decode_steps=num_decode_steps,
            append_only=append_only,
        )
        link.sessions.add(state.session_id)
        self._plan = plan
        self._unread = None
        self._drafted = proposal.draft_token_ids
        self._decoded = ()
        self._sent_at = self._clock()
        self._pending = link.send(call, call_id, streaming=num_decode_steps > 1)

    async def _receive(self, num_draft_tokens: int) -> Scored:
        pending, plan = self._pending, self._plan
        if pending is None or plan is None:
            raise PeerUnavailable("target", "no call in flight")
        try:
            reply = await pending.next(self._call_timeout_s)
        except TimeoutError:
            if self.link is not None:
                self.link.cancel(pending.call_id)
            raise PeerUnavailable("target", f"no answer within {self._call_timeout_s} s") from None
        if reply.HasField("error"):
            self._pending = None
            raise status.from_call_error(reply.error, self._state.request_id, plan.keep_length)
        if not reply.more_follows:
            self._pending = None
        if plan.opens and plan.epoch > 1 and not self._decoded:
            self.num_reopens += 1
        elif plan.opens and plan.epoch == 1:
            # A carried-over prefix may be cached too; it is output, not prompt.
            cached = min(reply.timing.cached_tokens, self._state.prompt_length)
            self.cached_prompt_tokens = max(self.cached_prompt_tokens, cached)
        replacement = codec.unpack_ids(reply.replacement_token_ids, "replacement_token_ids")
        # What the target holds beyond the committed tokens of the call: the draft tokens, or with
        # decode-ahead the tokens it has fed back to itself so far.
        self._unread = (reply.cached_length, self._drafted or self._decoded)
        self._decoded = (*self._decoded, *replacement)
        scores = TargetScores(
            codec.unpack_array(reply.target_probs, np.float64, "target_probs"), replacement
        )
        return Scored(
            scores,
            reply.logprobs if reply.HasField("logprobs") else None,
            reply.timing,
            reply.more_follows,
            self._clock() - self._sent_at,
        )

    async def _leave(self, error: SpecServeError, avoid: set[str]) -> None:
        """Give the session up here; the next attempt opens it anew, elsewhere where it can."""
        link = self.link
        logger.info(
            "request %s leaves target %s: %s",
            self._state.request_id,
            link.address if link else "(none)",
            error,
        )
        if link is None:
            return
        # A replica that refuses at once is asked again only after a pause.
        pause = isinstance(error, Preempted | CapacityExhausted) or link.address in avoid
        avoid.add(link.address)
        self.close()
        self._unread = None
        self._state.target.reopen()
        if pause:
            await asyncio.sleep(RETRY_PAUSE_S)
