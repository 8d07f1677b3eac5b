"""One session held by a replica: the tokens whose KV it has, its blocks, its last answer.

Knows tokens, lengths and times; knows no logits, no forward and no batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve.model.kv_cache import BlockTable
from specserve.model.messages import Reply, SessionOpening
from specserve.speculation.digest import TokenChain

if TYPE_CHECKING:
    from specserve.model.calls import CallState

_GAP_WEIGHT = 0.25
_LONGEST_ROUND_GAP_S = 1.0
"""A longer silence is a slow reader or a pause, not the rhythm of rounds."""


@dataclass(slots=True, eq=False)
class KvSession:
    """A session held by this replica."""

    session_id: str
    opening: SessionOpening
    epoch: int
    serial: int
    """Order of opening; the youngest is preempted first."""
    blocks: BlockTable | None
    """None when the engine holds no KV."""
    chain: TokenChain = field(default_factory=TokenChain)
    """The tokens whose KV is held: the truth about cached_length."""
    last_step: int = -1
    in_flight: CallState | None = None
    stored_replies: tuple[Reply, ...] = ()
    """What last_step was answered, for a repeated call; empty if it failed."""
    preempted: bool = False
    """The blocks went to another session; the next call is told so."""
    replied_at: float | None = None
    gap_s: float | None = None
    """Moving average of the time between a reply and the next call."""
    gap_deviation_s: float = 0.0

    @property
    def cached_length(self) -> int:
        """Tokens whose KV is held."""
        return len(self.chain)

    def truncate(self, length: int) -> None:
        """Forget everything beyond `length` tokens."""
        self.chain.truncate(length)
        if self.blocks is not None:
            self.blocks.truncate(length)

    def note_arrival(self, now: float) -> None:
        """Learn this session's rhythm from a new call."""
        if self.replied_at is None:
            return
        gap = now - self.replied_at
        self.replied_at = None
        if gap > _LONGEST_ROUND_GAP_S:
            return
        if self.gap_s is None:
            self.gap_s, self.gap_deviation_s = gap, gap / 2
        else:
            error = gap - self.gap_s
            self.gap_s += _GAP_WEIGHT * error
            self.gap_deviation_s += _GAP_WEIGHT * (abs(error) - self.gap_deviation_s)

    @property
    def next_call_at(self) -> float | None:
        """When the next call should have come; None while one is here or nothing is known."""
        if self.replied_at is None or self.gap_s is None:
            return None
        return self.replied_at + self.gap_s + self.gap_deviation_s
