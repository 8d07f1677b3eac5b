"""A Propose call in flight: append, then draft one token a forward.

Knows one session's draws; knows no batch and no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.errors import NonFiniteLogits
from specserve.model.calls import CallState
from specserve.model.draft_confidence import GuessConfidence
from specserve.model.messages import ProposeCall, ProposeReply
from specserve.model.row_top import RowTops
from specserve.model.session import KvSession
from specserve.speculation.scoring import DraftDraw, DraftRow
from specserve.speculation.types import SparseProbs


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A drawn draft token and the row it was drawn from."""

    draw: DraftDraw
    tops: RowTops | None
    """Head of the rows of its forward; None where no outcome is foreseen."""
    row: int
    """Its row among them."""
    confidence: float = 1.0
    """Probability of the most likely token of its row; 1 where nobody asked."""


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
        confidence_threshold: float = 0.0,
    ) -> None:
        super().__init__(session, call, feed, now)
        self._num_speculative_tokens = num_speculative_tokens
        self._confidence = GuessConfidence(confidence_threshold)
        self.drafted: list[DraftedToken] = []

    def resume(self, drafted: Sequence[DraftedToken], forward_s: Sequence[float]) -> None:
        """Take over tokens that were drafted before the call came; the session holds their KV.

        Args:
            drafted: the first tokens of what this call would draw, at least one.
            forward_s: seconds of the forward that drew each.
        """
        for token in drafted[: self._num_speculative_tokens]:
            self._keep(token)
        self.hidden_tokens = len(self.drafted)
        self.hidden_s = sum(forward_s[: self.hidden_tokens])
        if len(self.drafted) < self._num_speculative_tokens:
            self.continue_with(self.drafted[-1].draw.token_id)

    @property
    def num_left(self) -> int:
        """Tokens that may still be drawn."""
        return self._num_speculative_tokens - len(self.drafted)

    def cancel(self) -> bool:
        """Draw no further token. What was drawn is kept: it may not depend on its own value.

        While the append runs it goes on (a long prompt does catch up); after it the call ends.
        """
        self.is_cancelled = True
        self.num_rows = 0
        return bool(self.drafted)

    def draft_row(self) -> DraftRow:
        """Return the keys of the token to draw next."""
        row = len(self.drafted)
        position = self.committed_length + row
        params, edits = self.session.opening.sampling, self.session.row_edits(position)
        return DraftRow(params, position, self.committed_length, row, edits)

    def drawn(self, token: DraftedToken) -> ProposeReply | None:
        """Take the drawn token; answer when it was the last.

        Raises:
            NonFiniteLogits: not even the first row was usable. (With constraints it may be theirs:
                they can leave a draft with a cut head no token, and then it proposes none.)
        """
        if token.draw.token_id < 0:
            if not self.drafted and self.session.opening.sampling.constraints is None:
                raise NonFiniteLogits(self.call.session_id, 0)
            # Keeping the drawn tokens and stopping is exact; dropping them because of what they
            # led to would not be.
            return self.finish()
        self._keep(token)
        if len(self.drafted) < self._num_speculative_tokens and not self.is_cancelled:
            self.continue_with(token.draw.token_id)
            return None
        return self.finish()

    def drawn_all(self, tokens: Sequence[DraftedToken]) -> ProposeReply | None:
        """Take tokens each of which but the last was fed; answer when the last one was the last.

        Raises:
            NonFiniteLogits: as for one token.
        """
        reply = None
        for index, token in enumerate(tokens):
            if index:
                self.advance(1)
            reply = self.drawn(token)
        return reply

    def _keep(self, token: DraftedToken) -> None:
        """Take a token into the guess, perhaps as its last one."""
        if len(self.drafted) < self._num_speculative_tokens:
            self.drafted.append(token)
            if self._confidence.ends_with(token.confidence):
                self._num_speculative_tokens = len(self.drafted)

    def finish(self) -> ProposeReply:
        """Answer with the tokens drawn so far."""
        draws = [token.draw for token in self.drafted]
        return self.propose_reply(tuple(draw.token_id for draw in draws), _sparse_probs(draws))


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
