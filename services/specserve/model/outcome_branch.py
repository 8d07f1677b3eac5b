"""One outcome of a running verify call, drafted as if it had been asked for.

A branch draws exactly what the call would draw that this outcome leads to: same tokens before it,
same keys, same sampler. Knows one path; knows no other branch and no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.model.draft_calls import DraftedToken
from specserve.model.draft_confidence import GuessConfidence
from specserve.model.kv_tail import BlockTail
from specserve.model.outcome_odds import Outcome
from specserve.model.runner import NO_IDS, SequenceSlice
from specserve.speculation.row_edits import RowEdits
from specserve.speculation.scoring import DraftRow
from specserve.speculation.types import SamplingParams


class Branch:
    """A proposal for the round that follows one outcome."""

    def __init__(
        self,
        session_id: str,
        outcome: Outcome,
        base_length: int,
        num_speculative_tokens: int,
        tail: BlockTail,
        params: SamplingParams,
        row_edits: Callable[[int, Sequence[int]], RowEdits | None],
        confidence_threshold: float = 0.0,
        context_ids: NDArray[np.int64] = NO_IDS,
    ) -> None:
        """Draw nothing yet.

        Args:
            base_length: tokens of the session before the outcome's last one.
            num_speculative_tokens: draft at most so many.
            row_edits: what constraints do to the row behind so many tokens of the session and some
                more.
            confidence_threshold: stop as an asked call does.
            context_ids: that its rows have columns for besides the head's. A token that the draft
                foresees has one, so that the call has no others.
        """
        self.session_id = session_id
        self.outcome = outcome
        self.base_length = base_length
        self.tail = tail
        self.drafted: list[DraftedToken] = []
        self.forward_s: list[float] = []
        """Seconds of the forward that drew each token."""
        self._num_speculative_tokens = num_speculative_tokens
        self._params = params
        self._row_edits = row_edits
        self._confidence = GuessConfidence(confidence_threshold)
        self._is_stopped = False
        self._context_ids = context_ids

    @property
    def is_open(self) -> bool:
        """Whether another token may be drafted."""
        return not self._is_stopped and len(self.drafted) < self._num_speculative_tokens

    @property
    def next_length(self) -> int:
        """Tokens whose KV is held after the next forward."""
        return self.base_length + len(self.drafted) + 1

    def stop(self) -> None:
        """Draft no more; what there is stays good."""
        self._is_stopped = True

    def slice(self) -> SequenceSlice:
        """Return this branch's part of the next forward; its blocks are ready to be written."""
        return SequenceSlice(
            [self._newest_token_id],
            self.next_length - 1,
            self.tail.blocks,
            num_logit_rows=1,
            context_ids=self._context_ids,
        )

    def draft_row(self) -> DraftRow:
        """Return the keys of the token to draw next: those of the call that may come."""
        committed_length, row = self.base_length + 1, len(self.drafted)
        edits = None
        if self._params.constraints is not None:
            edits = self._row_edits(self.base_length, self.held_token_ids(row + 1))
        return DraftRow(self._params, committed_length + row, committed_length, row, edits)

    def drawn(self, token: DraftedToken, forward_s: float) -> None:
        """Take the token drawn from the last forward."""
        if token.draw.token_id < 0:
            # As an asked call: what was drawn before an unusable row stays.
            self._is_stopped = True
            return
        self.drafted.append(token)
        self.forward_s.append(forward_s)
        if self._confidence.ends_with(token.confidence):
            self._is_stopped = True

    def held_token_ids(self, num_drafted: int) -> Sequence[int]:
        """Return the tokens beyond base_length whose KV is needed behind so many drafted ones."""
        drafted = (token.draw.token_id for token in self.drafted[: max(0, num_drafted - 1)])
        return (self.outcome.token_id, *drafted)

    @property
    def _newest_token_id(self) -> int:
        return self.drafted[-1].draw.token_id if self.drafted else self.outcome.token_id
