"""One request's session on one target replica: its calls go out, its replies come back.

Knows one link and the request's bookkeeping; knows no other replica and no retry.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from specserve.errors import PeerUnavailable, SpecServeError
from specserve.orchestrator.pool import TargetLink
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.target_call import Scored, TargetCall, pack_verify_call
from specserve.rpc import codec, status
from specserve.rpc.v1 import common_pb2, target_pb2
from specserve.speculation.types import Proposal


class TargetAttachment:
    """A session on a replica; one call at a time."""

    def __init__(
        self,
        link: TargetLink,
        state: RequestState,
        opening: common_pb2.SessionOpening,
        *,
        call_timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.link = link
        self._state = state
        self._opening = opening
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._call: TargetCall | None = None
        """The last call, answered or not."""

    @property
    def is_held(self) -> bool:
        """Say whether the replica can be reached and, for all we know, still holds the session."""
        return self.link.connected and self._state.session_id in self.link.sessions

    def send(
        self,
        proposal: Proposal,
        num_decode_steps: int,
        traceparent: str,
        *,
        append_only: bool = False,
    ) -> None:
        """Send a call: append what is committed, then score the proposal or decode ahead."""
        link, state = self.link, self._state
        plan = state.plan_call(state.target, codec.MAX_APPEND_TOKENS)
        message = pack_verify_call(
            link.next_call_id(),
            state,
            plan,
            proposal,
            self._opening,
            num_decode_steps=num_decode_steps,
            append_only=append_only,
            timeout_s=self._call_timeout_s,
            traceparent=traceparent,
        )
        link.sessions.add(state.session_id)
        pending = link.send(message, message.session.call_id, streaming=num_decode_steps > 1)
        state.trace.chores.call_sent()
        now = self._clock()
        self._call = TargetCall(
            plan, pending, proposal.draft_token_ids, now, now, append_only=append_only
        )

    async def receive(self) -> Scored:
        """Wait for the next reply of the call in flight.

        Raises:
            PeerUnavailable: there is none, or none came in time.
            SpecServeError: what the replica answered instead.
        """
        call = self._call
        if call is None or not call.is_open:
            raise PeerUnavailable("target", "no call in flight")
        try:
            reply = await self._next_reply(call)
        except TimeoutError:
            self._write_down(call, error=PeerUnavailable.__name__)
            self.give_up_call()
            raise PeerUnavailable("target", f"no answer within {self._call_timeout_s} s") from None
        except SpecServeError as error:
            self._write_down(call, error=type(error).__name__)
            raise
        if reply.HasField("error"):
            self.forget_call()
            self._write_down(call, error=reply.error.error)
            raise status.from_call_error(reply.error, self._state.request_id, call.plan.keep_length)
        vocab_size = self.link.model.vocab_size if self.link.model is not None else 0
        try:
            scored = call.read(reply, self._clock(), vocab_size)
        except PeerUnavailable:
            self._write_down(call, error=PeerUnavailable.__name__)
            self.give_up_call()
            raise
        call.timing = reply.timing
        if not reply.more_follows:
            self._write_down(call)
        return scored

    async def _next_reply(self, call: TargetCall) -> target_pb2.VerifyReply:
        """Wait for a reply that was not read before, whatever the way here did to their order."""
        reply = await call.pending.next(self._call_timeout_s)
        try:
            while not reply.HasField("error") and call.is_repeat(reply):
                reply = await call.pending.next(self._call_timeout_s)
        except PeerUnavailable as error:
            self._write_down(call, error=type(error).__name__)
            self.give_up_call()
            raise
        return reply

    def settle(self) -> None:
        """Move the target's cached_length by the last reply, as far as it has been committed."""
        call = self._call
        if call is not None and call.cached_length is not None:
            self._state.absorb(
                self._state.target, call.plan, call.cached_length, call.held_token_ids
            )

    def give_up_call(self) -> None:
        """Tell the replica that no more replies are wanted."""
        if self._call is not None and self._call.is_open:
            self.link.cancel(self._call.pending.call_id)
            self._write_down(self._call)
        self.forget_call()

    def forget_call(self) -> None:
        """Await no more replies: none are due, or the stream that they came on is cut."""
        if self._call is not None:
            self._call.is_open = False

    def _write_down(self, call: TargetCall, error: str = "") -> None:
        """Note a call that no more replies are read of. Once: later ends of it are none."""
        if call.is_written_down:
            return
        call.is_written_down = True
        self._state.trace.note_call(
            "target",
            self.link,
            call.began_at,
            epoch=call.plan.epoch,
            timing=call.timing,
            num_replies=call.num_replies,
            error=error,
        )

    def close(self) -> None:
        """Give up what is in flight and free the session. Idempotent."""
        self.give_up_call()
        self.link.release(self._state.session_id)
