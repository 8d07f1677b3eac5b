"""One request's target, whichever replica it is: open, verify, decode ahead, move.

Target trouble means the same call on another replica from the committed tokens; a replica that
drains is left while it still serves (`target_departure.py`). Knows replicas and errors; the
messages are `target_attachment.py`'s. Accepts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from specserve.errors import (
    CacheMismatch,
    CapacityExhausted,
    DeviceDied,
    Draining,
    ModelMismatch,
    PeerUnavailable,
    PoisonRequest,
    Preempted,
    SessionNotFound,
    SpecServeError,
    StaleStep,
)
from specserve.orchestrator.pool import Pool, TargetLink
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.target_attachment import TargetAttachment
from specserve.orchestrator.target_call import Scored
from specserve.orchestrator.target_departure import TargetDeparture
from specserve.rpc import codec
from specserve.rpc.v1 import common_pb2, target_pb2
from specserve.speculation.types import Proposal

logger = logging.getLogger(__name__)

_MOVE = (PeerUnavailable, SessionNotFound, Preempted, Draining, StaleStep, CapacityExhausted)
"""Errors after which the session is opened anew, on another replica where there is one."""

RETRY_PAUSE_S = 0.1
"""Pause before a session asks again for blocks, or a replica that it has just left."""

ROOM_WAIT_S = 2.0
"""How long a preempted session looks for free blocks before it is opened without them: the target's
scheduler then takes them from younger ones, so that none waits for ever."""

MAX_MISMATCHES = 3
"""Cache mismatches in a row after which the session is opened anew."""


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
        self.num_reopens = 0
        self.num_preemptions = 0
        """Times that its KV blocks went to another session."""
        self.cached_prompt_tokens = 0
        """Prompt tokens found in the prefix cache when the session was first opened."""
        self._state = state
        self._pool = pool
        self._opening = opening
        self._call_timeout_s = call_timeout_s
        self._reopen_timeout_s = reopen_timeout_s
        self._clock = clock
        self._began = clock()
        self._attachment: TargetAttachment | None = None
        self._departure = TargetDeparture(state, pool, clock)

    @property
    def identity(self) -> str:
        """What makes the text: that of the pool that the session is opened in."""
        return self._pool.identity

    @property
    def link(self) -> TargetLink | None:
        """The replica that the session is on; None before it is opened anywhere."""
        return self._attachment.link if self._attachment else None

    async def verify(self, proposal: Proposal, num_decode_steps: int, traceparent: str) -> Scored:
        """Score a proposal, or begin to decode ahead (then `next_token` gives the rest).

        Cancelling leaves a call in flight; `close` gives it up.

        Raises:
            PeerUnavailable: no target answered within the reopen timeout.
            ModelMismatch: the targets that could go on with the text are gone for good.
            PoisonRequest: devices die of it.
            SpecServeError: the request itself cannot go on (NonFiniteLogits, InvalidProposal).
        """
        self._leave_draining()
        avoid: set[str] = set()
        mismatches = 0
        deadline = None if self._attachment else self._clock() + self._reopen_timeout_s
        while True:
            try:
                attachment = await self._attach(avoid, deadline)
                await self._append_pieces(attachment, traceparent)
                attachment.send(proposal, num_decode_steps, traceparent)
                scored = self._note(await attachment.receive())
            except CacheMismatch as error:
                mismatches += 1
                self._state.correct(self._state.target, error.matching_length)
                if mismatches >= MAX_MISMATCHES:
                    self._state.target.reopen()
            except _MOVE as error:
                if self._is_cut(error, deadline):
                    deadline = deadline or self._clock() + self._reopen_timeout_s
                    continue
                self._blame(error)
                if (left := self._departure.undo(error)) is not None:
                    self.close()
                    self._attachment = left
                    continue
                if isinstance(error, Preempted):
                    pass  # a matter of time, not of loss: the oldest always gets on
                elif deadline is None:
                    deadline = self._clock() + self._reopen_timeout_s
                elif self._clock() >= deadline:
                    raise
                await self._leave(error, avoid)
            else:
                self._departure.finish()
                self._state.target_deaths.note_progress()
                return scored

    def _is_cut(self, error: SpecServeError, deadline: float | None) -> bool:
        """Say whether only the stream is lost, and may come back before the deadline.

        What the replica holds is then there still, the KV of a long prompt among it: the same call
        goes out again when the stream is there. While another replica is being left it does not.
        """
        attachment = self._attachment
        if attachment is None or not isinstance(error, PeerUnavailable) or self._departure.is_on:
            return False
        is_late = deadline is not None and self._clock() >= deadline
        if is_late or not attachment.link.is_returning:
            return False
        attachment.forget_call()
        return True

    async def next_token(self) -> Scored:
        """Wait for the next token of decode-ahead.

        Raises:
            PeerUnavailable: the replica was lost or is to be left; begin a new round from what is
                committed.
            PoisonRequest: devices die of it.
        """
        attachment = self._attachment
        if attachment is None:
            raise PeerUnavailable("target", "no replica")
        if self._departure.successor(attachment) is not None:
            attachment.give_up_call()
            raise PeerUnavailable("target", f"{attachment.link.address} drains")
        try:
            return await attachment.receive()
        except _MOVE as error:
            link = attachment.link
            if isinstance(error, PeerUnavailable) and (link.connected or link.is_returning):
                # The stream was cut; the replica and what it holds may well be there still.
                attachment.forget_call()
                raise
            self._blame(error)
            await self._leave(error, set())
            raise PeerUnavailable("target", str(error)) from error

    def settle(self) -> None:
        """Move the target's cached_length by its last reply, as far as it has been committed."""
        if self._attachment is not None:
            self._attachment.settle()

    def give_up_decode_ahead(self) -> None:
        """Stop a decode-ahead whose further tokens are not wanted."""
        if self._attachment is not None:
            self._attachment.give_up_call()

    def close(self) -> None:
        """Give up what is in flight and free the session. Idempotent."""
        self._departure.finish()
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None

    async def _attach(self, avoid: set[str], deadline: float | None) -> TargetAttachment:
        if self._attachment is None:
            timeout_s = self._reopen_timeout_s
            left = timeout_s if deadline is None else max(0.0, deadline - self._clock())
            demand = self._state.demand
            link = await self._pool.wait_for_one(left, demand, avoid)
            while link is None and self._pool.newer is not None:
                self._change_pool(self._pool.newer)
                link = await self._pool.wait_for_one(left, demand, avoid)
            if link is None:
                raise PeerUnavailable("target", f"no replica was usable for {timeout_s} s")
            self._attachment = self._on(link)
        return self._attachment

    def _change_pool(self, newer: Pool[target_pb2.VerifyCall, target_pb2.VerifyReply]) -> None:
        """Go on with the model that took this one's place, if nothing was said by the old one.

        Raises:
            ModelMismatch: the text has begun.
        """
        if self._state.num_output_tokens:
            raise ModelMismatch("the target pool", newer.identity, self._pool.identity)
        self._pool = newer
        self._departure = TargetDeparture(self._state, newer, self._clock)

    def _on(self, link: TargetLink) -> TargetAttachment:
        opening = common_pb2.SessionOpening()
        opening.CopyFrom(self._opening)
        opening.age_s = max(0.0, self._clock() - self._began)
        return TargetAttachment(
            link,
            self._state,
            opening,
            call_timeout_s=self._call_timeout_s,
            clock=self._clock,
        )

    async def _append_pieces(self, attachment: TargetAttachment, traceparent: str) -> None:
        """Send all but the last piece of a prompt that is too long for one call."""
        state = self._state
        while state.committed_length - state.target.cached_length > codec.MAX_APPEND_TOKENS:
            attachment.send(Proposal((), None), 1, traceparent, append_only=True)
            self._note(await attachment.receive())
            attachment.settle()

    def _note(self, scored: Scored) -> Scored:
        """Count what only the first answer of an epoch tells."""
        if scored.opened_epoch > 1:
            self.num_reopens += 1
        elif scored.opened_epoch == 1:
            # A carried-over prefix may be cached too; it is output, not prompt.
            cached = min(scored.timing.cached_tokens, self._state.prompt_length)
            self.cached_prompt_tokens = max(self.cached_prompt_tokens, cached)
        return scored

    def _blame(self, error: SpecServeError) -> None:
        """Give the request up if devices die of it.

        Raises:
            PoisonRequest: they do.
        """
        if not isinstance(error, DeviceDied):
            return
        deaths = self._state.target_deaths
        deaths.note_death(error.num_computed)
        if deaths.is_proven:
            poison = PoisonRequest(self._state.request_id, deaths.count)
            logger.error("%s", poison)
            self._pool.condemn(self._state.session_id)
            raise poison from error

    async def _leave(self, error: SpecServeError, avoid: set[str]) -> None:
        """Give the session up here; the next attempt opens it anew, elsewhere where it can."""
        address = self._attachment.link.address if self._attachment else "(none)"
        logger.info("request %s leaves target %s: %s", self._state.request_id, address, error)
        if self._attachment is None:
            return
        # A replica that refuses at once is asked again only after a pause.
        is_preempted = isinstance(error, Preempted)
        pause = is_preempted or isinstance(error, CapacityExhausted) or address in avoid
        self.close()
        self._state.target.reopen()
        if pause:
            await asyncio.sleep(RETRY_PAUSE_S)
        if is_preempted:
            self.num_preemptions += 1
            await self._pool.wait_for_room(self._state.demand, self._opening.priority, ROOM_WAIT_S)
        else:
            avoid.add(address)

    def _leave_draining(self) -> None:
        """Move on from a replica that drains, if there is another."""
        attachment = self._attachment
        successor = self._departure.successor(attachment)
        if attachment is not None and successor is not None:
            self._departure.begin(attachment)
            self._attachment = self._on(successor)
