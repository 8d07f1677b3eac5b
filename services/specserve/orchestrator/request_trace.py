"""One request as it is remembered: when it came, its rounds, and every call that they made.

Noted as it happens and handed over round by round, so that a long request costs no long pause at
its end. Knows times, lengths and counts; sees no token and no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from specserve.config import SpeculativeMethod
from specserve.orchestrator.chores import Chores
from specserve.orchestrator.round_note import NO_TIMING, CallNote, RoundNote
from specserve.rpc.v1 import common_pb2
from specserve.speculation.length_choice import Choice
from specserve.telemetry import TraceContext

LATE = "late"
"""What a proposal is called that missed its round: it is no error of anybody."""

UNTRACED = TraceContext(0, 0, False)


class Peer(Protocol):
    """The replica that a call went to: a link."""

    @property
    def address(self) -> str:
        """host:port."""
        ...

    @property
    def model(self) -> common_pb2.GetModelResponse | None:
        """What it serves."""
        ...


class RequestTrace:
    """One request's rounds. `begin_round` ends the one before, so that they leave no gap."""

    def __init__(
        self,
        context: TraceContext = UNTRACED,
        on_round: Callable[[RoundNote], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin now.

        Args:
            on_round: told of each round once it has ended, and the next one's first call has left.
        """
        self.context = context
        self.clock = clock
        self.arrived_at = clock()
        self.arrived_unix_s = time.time()
        self.decoding_at: float | None = None
        """When the first round began; None before it."""
        self.ended_at: float | None = None
        self.first_token_at: float | None = None
        """When the first token was committed."""
        self.num_emitted_tokens = 0
        self.num_rounds = 0
        self.round_context = context
        """The span of the present round."""
        self.chores = Chores()
        """Run at the latest when the request ends."""
        self._on_round = on_round
        self._round: RoundNote | None = None

    def begin_round(self) -> str:
        """Begin a round; returns the traceparent of its calls, empty where nobody records them."""
        now = self.clock()
        self._end_round(now)
        if self.decoding_at is None:
            self.decoding_at = now
        self.num_rounds += 1
        self._round = RoundNote(now - self.arrived_at)
        if not self.context.is_sampled:
            return ""
        self.round_context = self.context.child()
        return self.round_context.traceparent

    def note_commit(
        self,
        choice: Choice,
        proposer: SpeculativeMethod | None,
        num_draft_tokens: int,
        num_accepted: int,
        num_emitted: int,
        lengths: tuple[int, int, int],
        target_probs: Sequence[float] = (),
        draft_probs: Sequence[float] | None = None,
    ) -> None:
        """Note what was committed: the round's block, or one token of its decode-ahead.

        Args:
            num_emitted: tokens that were left after trimming.
            lengths: committed tokens, and those that draft and target are known to hold.
            target_probs: [K] p of each draft token.
            draft_probs: [K] q of each; None where the rule needs none.
        """
        round_ = self._round
        if round_ is None:
            return
        round_.num_speculative_tokens = choice.num_speculative_tokens
        round_.reason = choice.reason
        if num_draft_tokens:
            round_.proposer = proposer
            round_.num_draft_tokens = num_draft_tokens
            round_.num_accepted_tokens = num_accepted
            round_.target_probs = target_probs
            round_.draft_probs = draft_probs or ()
        if self.first_token_at is None:
            self.first_token_at = self.clock()
        round_.num_emitted_tokens += num_emitted
        self.num_emitted_tokens += num_emitted
        round_.lengths = lengths

    def note_call(
        self,
        service: str,
        peer: Peer,
        sent_at: float,
        *,
        epoch: int,
        timing: common_pb2.CallTiming | None = None,
        num_replies: int = 1,
        error: str = "",
        is_background: bool = False,
    ) -> None:
        """Note a call that has ended now, however it ended.

        Args:
            sent_at: when it was sent, by this trace's clock.
            is_background: nobody waited for it, so that it may have ended before now.
        """
        round_ = self._round
        if round_ is None:
            return
        wall_s = self.clock() - sent_at
        if is_background and timing is not None:
            wall_s = min(wall_s, timing.queue_s + timing.forward_s)
        round_.calls.append(
            CallNote(
                service,
                peer.address,
                peer.model,
                sent_at - self.arrived_at,
                wall_s,
                NO_TIMING if timing is None else timing,
                num_replies,
                error,
                is_background,
                epoch,
            )
        )

    @property
    def num_emitted_in_round(self) -> int:
        """Tokens that the present round has emitted so far."""
        return 0 if self._round is None else self._round.num_emitted_tokens

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its arrival to its first token; None before it."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    def end(self) -> None:
        """End the last round, and the request. Idempotent."""
        if self.ended_at is None:
            self.ended_at = self.clock()
            self._end_round(self.ended_at)
            self.chores.run()

    def _end_round(self, now: float) -> None:
        round_, self._round = self._round, None
        if round_ is None:
            return
        round_.wall_s = now - self.arrived_at - round_.began_s
        if self._on_round is None:
            return
        if self.context.is_sampled:
            self.chores.run()
            self._on_round(round_)  # its span is still the present one
        else:
            self.chores.add(partial(self._on_round, round_))
