"""One session held by a replica: the tokens whose KV it has, its blocks, its last answer.

Knows tokens, lengths and times; knows no logits, no forward and no batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specserve.model.context_ids import ContextIds
from specserve.model.kv_cache import BlockTable
from specserve.model.messages import Reply, SessionOpening
from specserve.model.runner import NO_IDS
from specserve.speculation.constraints import ConstraintState
from specserve.speculation.digest import TokenChain
from specserve.speculation.row_edits import RowEdits
from specserve.speculation.token_matcher import TokenMatcher

if TYPE_CHECKING:
    from specserve.model.calls import CallState
    from specserve.model.outcome_round import RoundAhead
    from specserve.model.overlap_trial import OverlapTrial

_NUM_GAPS = 8
_LONGEST_ROUND_GAP_S = 1.0
"""A longer silence is a slow reader or a pause, not the rhythm of rounds."""


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """A Propose call, to tell with the next one how long its round took."""

    at: float
    committed_length: int
    num_speculative_tokens: int
    trial: OverlapTrial
    """What the round counts for."""
    turn: int
    """The trial's, then."""
    was_foreseen: bool
    """Whether the round before it was looked ahead of: the call is a hit or a miss."""


@dataclass(slots=True, eq=False)
class KvSession:
    """A session held by this replica."""

    session_id: str
    opening: SessionOpening
    epoch: int
    since: float
    """When its request came, by the engine's clock; the youngest is preempted first."""
    serial: int
    """Order of opening, which decides between requests that came together."""
    blocks: BlockTable | None
    """None when the engine holds no KV."""
    chain: TokenChain = field(default_factory=TokenChain)
    """The tokens whose KV is held: the truth about cached_length."""
    last_step: int = -1
    in_flight: CallState | None = None
    ahead: RoundAhead | None = None
    """What is drafted while the target verifies; None while a call is here, or without a cache."""
    round_began: RoundBegan | None = None
    """None without an outcome cache."""
    stored_replies: tuple[Reply, ...] = ()
    """What last_step was answered, for a repeated call; empty if it failed."""
    preempted: bool = False
    """The blocks went to another session; the next call is told so."""
    call_tokens: int = 1
    """Of its last call that wanted any computed; the next one is taken to want as many."""
    replied_at: float | None = None
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_GAPS))
    """The last times between a reply and the next call. They need not be alike: a proposal that
    was drafted ahead comes sooner than one that was not."""
    constraint_state: ConstraintState | None = None
    """Follows `chain`; None before the first constrained row."""
    context_ids: ContextIds | None = None
    """Ids of its text that a draft's cut head lacks; None where the head takes no more."""
    new_matcher: Callable[[], TokenMatcher] | None = None
    """Makes a matcher of the opening's grammar; None without one."""

    @property
    def cached_length(self) -> int:
        """Tokens whose KV is held."""
        return len(self.chain)

    @property
    def more_ids(self) -> NDArray[np.int64]:
        """Return [E] ascending ids that its rows have columns for besides the head's."""
        return NO_IDS if self.context_ids is None else self.context_ids.ids

    def truncate(self, length: int) -> None:
        """Forget everything beyond `length` tokens."""
        if self.ahead is not None:
            self.ahead.truncated(length)
        self.chain.truncate(length)
        if self.constraint_state is not None:
            self.constraint_state.truncate(length)
        if self.blocks is not None:
            self.blocks.truncate(length)

    def row_edits(self, length: int, then: Sequence[int] = ()) -> RowEdits | None:
        """Return what the constraints do to the row behind the first `length` tokens held.

        Args:
            then: tokens that follow these `length` on the way to the row.
        """
        constraints = self.opening.sampling.constraints
        if constraints is None:
            return None
        state = self.constraint_state
        if state is None or state.constraints is not constraints:
            matcher = None if self.new_matcher is None else self.new_matcher()
            state = self.constraint_state = ConstraintState(constraints, matcher)
        state.follow(self.chain, length)
        return state.edits_after(then)

    def note_arrival(self, now: float) -> None:
        """Learn this session's rhythm from a new call."""
        if self.replied_at is None:
            return
        # A call that came while the answer to the one before was computed has waited for nothing.
        gap = max(0.0, now - self.replied_at)
        self.replied_at = None
        if gap <= _LONGEST_ROUND_GAP_S:
            self.gaps_s.append(gap)

    def is_active(self, now: float) -> bool:
        """Tell whether a call is here or may come soon."""
        return self.in_flight is not None or (
            self.replied_at is not None and now - self.replied_at < _LONGEST_ROUND_GAP_S
        )

    def due_in_s(self, now: float, late: float = 0.0) -> list[float]:
        """Return in how many seconds the next call may come, each as likely as the others.

        Those of the last gaps that are not over yet. Empty while a call is here, while nothing is
        known, and when the call is later than it ever was.

        Args:
            late: take every gap for longer, by this share of it.
        """
        if self.replied_at is None:
            return []
        silent_s, stretch = now - self.replied_at, 1.0 + late
        return [gap * stretch - silent_s for gap in self.gaps_s if gap * stretch > silent_s]
