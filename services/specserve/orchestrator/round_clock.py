"""Where one round's time goes, noted as it happens.

Knows replies and a clock; decides nothing and learns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specserve.orchestrator.proposer import Drafted
from specserve.orchestrator.target_call import Scored
from specserve.speculation.cost_model import PlainTiming, RoundTiming


@dataclass(slots=True)
class RoundClock:
    """One decision's round, or its decode-ahead call."""

    began: float
    num_asked: int
    """K asked for; 0 for decode-ahead."""
    clock: Callable[[], float]
    is_probe: bool = False
    """It was chosen to be measured; the draft may be caught up first."""
    drafted: Drafted | None = None
    num_accepted: int = 0
    num_committed: int = 0
    is_measurable: bool = True
    """False where a forward held more than the round: a prompt, a session opened anew."""
    _forwards: list[tuple[int, float]] = field(default_factory=list)
    _forward_s: float = 0.0
    _queue_s: float = 0.0
    _first_at: float | None = None

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that came."""
        return 0 if self.drafted is None else len(self.drafted.proposal.draft_token_ids)

    @property
    def waited_s(self) -> float:
        """Seconds waited for a proposal."""
        return 0.0 if self.drafted is None else self.drafted.wait_s

    @property
    def last_forward_s(self) -> float:
        """Seconds of the target's last forward; 0 before the first."""
        return self._forwards[-1][1] if self._forwards else 0.0

    def scored(self, scored: Scored, num_accepted: int) -> None:
        """Note an answer of the target: the round's, or one token of decode-ahead."""
        timing = scored.timing
        if self._first_at is None:
            self._first_at = self.clock()
            self._queue_s = timing.queue_s
        if scored.opened_epoch:
            self.is_measurable = False
        # forward_s counts from the start of the call.
        self._forwards.append((timing.rows, timing.forward_s - self._forward_s))
        self._forward_s = timing.forward_s
        self.num_accepted = num_accepted
        self.num_committed += num_accepted + 1

    def plain_timing(self, now: float) -> PlainTiming | None:
        """Return the times of decode-ahead; None before its first token."""
        if self._first_at is None:
            return None
        waited = self.waited_s
        return PlainTiming(
            num_tokens=len(self._forwards),
            wall_s=now - self.began - waited,
            first_wait_s=self._first_at - self.began - waited,
            forwards=tuple(self._forwards),
        )

    def round_timing(self, now: float) -> RoundTiming | None:
        """Return the times of a round with draft tokens; None before it was verified."""
        drafted = self.drafted
        if self._first_at is None or drafted is None:
            return None
        timing = drafted.timing
        return RoundTiming(
            num_draft_tokens=self.num_draft_tokens,
            wall_s=now - self.began,
            draft_wait_s=drafted.wait_s,
            draft_queue_s=timing.queue_s if timing else 0.0,
            draft_forward_s=timing.forward_s if timing else 0.0,
            draft_rows=timing.rows if timing else 0,
            num_hidden_tokens=timing.hidden_tokens if timing else 0,
            verify_queue_s=self._queue_s,
            verify_forward_s=self._forward_s,
            verify_rows=self._forwards[0][0],
        )
