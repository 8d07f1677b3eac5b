"""A Propose call in flight: append, then draft one token a forward.

Knows one session's draws; knows no batch and no logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.errors import NonFiniteLogits
from specserve.model.calls import CallState
from specserve.model.messages import ProposeCall, ProposeReply
from specserve.model.session import KvSession
from specserve.speculation.scoring import DraftDraw, DraftRow
from specserve.speculation.types import SparseProbs


class ProposeState(CallState):
    """Append, then draft one token a forward."""

    num_rows = 1

    def __init__(
        self,
        session: KvSession,
        call: ProposeCall,
        feed: Sequence[int],
        now: float,
        num_speculative_tokens: int,
    ) -> None:
        super().__init__(session, call, feed, now)
        self._num_speculative_tokens = num_speculative_tokens
        self._draws: list[DraftDraw] = []

    def cancel(self) -> bool:
        """Draw no further token. What was drawn is kept: it may not depend on its own value.

        While the append runs it goes on (a long prompt does catch up); after it the call ends.
        """
        self.is_cancelled = True
        self.num_rows = 0
        return bool(self._draws)

    def draft_row(self) -> DraftRow:
        """Return the keys of the token to draw next."""
        row = len(self._draws)
        return DraftRow(
            self.session.opening.sampling, self.committed_length + row, self.committed_length, row
        )

    def drawn(self, draw: DraftDraw) -> ProposeReply | None:
        """Take the drawn token; answer when it was the last.

        Raises:
            NonFiniteLogits: not even the first row was usable.
        """
        if draw.token_id < 0:
            if not self._draws:
                raise NonFiniteLogits(self.call.session_id, 0)
            # Keeping the drawn tokens and stopping is exact; dropping them because of what they
            # led to would not be.
            return self.finish()
        self._draws.append(draw)
        if len(self._draws) < self._num_speculative_tokens and not self.is_cancelled:
            self.continue_with(draw.token_id)
            return None
        return self.finish()

    def finish(self) -> ProposeReply:
        """Answer with the tokens drawn so far."""
        return self.propose_reply(
            tuple(draw.token_id for draw in self._draws), _sparse_probs(self._draws)
        )


def _sparse_probs(draws: Sequence[DraftDraw]) -> SparseProbs | None:
    """Stack the q of each draw, padded with weight 0; None when the rule has no q."""
    supports = [
        (draw.support_token_ids, draw.support_weights)
        for draw in draws
        if draw.support_token_ids is not None and draw.support_weights is not None
    ]
    if not supports:
        return None
    width = max(len(ids) for ids, _ in supports)
    token_ids = np.zeros((len(supports), width), dtype=np.int32)
    weights = np.zeros((len(supports), width), dtype=np.float32)
    for i, (row_ids, row_weights) in enumerate(supports):
        token_ids[i, : len(row_ids)] = row_ids
        weights[i, : len(row_weights)] = row_weights
    return SparseProbs(token_ids, weights)
