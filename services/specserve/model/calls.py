"""A call from arrival to its last reply: what it feeds, which rows it wants, what it answers.

Knows one session and its tokens; knows no batch, no block and no forward. Every kind of call is the
same to the scheduler: tokens still to be fed, and how many logit rows are wanted at their end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.model.messages import (
    CallTiming,
    ProposeCall,
    ProposeReply,
    Reply,
    TokenLogprobs,
    VerifyCall,
    VerifyReply,
)
from specserve.model.session import KvSession
from specserve.speculation.types import SparseProbs


class CallState:
    """What every call has. On its own: a call that only appends (no row is wanted)."""

    num_rows = 0
    """Logit rows wanted for the last this many tokens of the feed."""

    def __init__(
        self, session: KvSession, call: ProposeCall | VerifyCall, feed: Sequence[int], now: float
    ) -> None:
        self.session = session
        self.call = call
        self.call_ids = [call.call_id]
        """All that wait for this answer: a duplicate of the step joins."""
        self.committed_length = call.keep_length + len(call.append_token_ids)
        self.arrived_at = now
        self.ready_at = now
        """Orders calls; moves with each token of decode-ahead, since each is a round of its own."""
        self.emitted: list[Reply] = []
        self.is_cancelled = False
        self.prefix_cached_tokens = 0
        self.hidden_tokens = 0
        self.hidden_s = 0.0
        self._feed = feed
        self._num_fed = 0
        self._started_at: float | None = None
        self.forward_s = 0.0
        self._batch_size = 0
        self._batch_rows = 0

    @property
    def num_remaining(self) -> int:
        """Tokens still to be fed before the wanted rows are there."""
        return len(self._feed) - self._num_fed

    @property
    def is_started(self) -> bool:
        """Whether a forward has served this call."""
        return self._started_at is not None

    @property
    def runs_alone(self) -> bool:
        """Whether it shares no forward: its caller suspects it of a device's death, until it has
        outlived that place.
        """
        return self.call.alone and not self.emitted

    def peek(self, count: int | None = None) -> Sequence[int]:
        """Return the next tokens of the feed; all of them without a count."""
        end = len(self._feed) if count is None else self._num_fed + count
        return self._feed[self._num_fed : end]

    def advance(self, count: int) -> None:
        """Move tokens from the feed to the session's chain: their KV is held now."""
        self.session.chain.append(self.peek(count))
        self._num_fed += count

    def note_start(self, now: float) -> bool:
        """Record that a forward is about to run; True when it is the first."""
        if self._started_at is not None:
            return False
        self._started_at = now
        return True

    def note_forward(self, forward_s: float, batch_size: int, rows: int) -> None:
        """Record a forward this call took part in."""
        self.forward_s += forward_s
        self._batch_size, self._batch_rows = batch_size, rows

    def timing(self) -> CallTiming:
        """Return where the time went."""
        started_at = self.arrived_at if self._started_at is None else self._started_at
        return CallTiming(
            started_at - self.arrived_at,
            self.forward_s,
            self._batch_size,
            self._batch_rows,
            self.hidden_tokens,
            self.hidden_s,
        )

    def finish(self) -> Reply:
        """Answer with what there is: the append is done and no row is wanted (any more)."""
        call = self.call
        if isinstance(call, ProposeCall):
            return self.propose_reply((), None)
        return self.verify_reply((), (), None)

    def cancel(self) -> bool:
        """Stop as early as the kind of call allows.

        Returns:
            True when the call is over now: the engine answers `emitted` or DeadlineExpired.
        """
        self.is_cancelled = True
        return False

    def continue_with(self, token_id: int) -> None:
        """Feed a token that was just drawn, for one more row."""
        self._feed, self._num_fed = (token_id,), 0

    def propose_reply(self, token_ids: tuple[int, ...], probs: SparseProbs | None) -> ProposeReply:
        """Build the reply of a Propose call as things stand."""
        return ProposeReply(
            call_id=self.call_ids[0],
            session_id=self.call.session_id,
            step=self.call.step,
            cached_length=self.session.cached_length,
            prefix_cached_tokens=self.prefix_cached_tokens,
            draft_token_ids=token_ids,
            draft_probs=probs,
            timing=self.timing(),
        )

    def verify_reply(
        self,
        target_probs: Sequence[float],
        replacement_token_ids: tuple[int, ...],
        logprobs: TokenLogprobs | None,
        *,
        more_follows: bool = False,
    ) -> VerifyReply:
        """Build a reply of a Verify call as things stand."""
        return VerifyReply(
            call_id=self.call_ids[0],
            session_id=self.call.session_id,
            step=self.call.step,
            cached_length=self.session.cached_length,
            prefix_cached_tokens=self.prefix_cached_tokens,
            target_probs=np.array(target_probs, dtype=np.float64),
            replacement_token_ids=replacement_token_ids,
            logprobs=logprobs,
            timing=self.timing(),
            more_follows=more_follows,
        )
