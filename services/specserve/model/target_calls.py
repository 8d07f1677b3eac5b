"""A Verify call in flight: score draft tokens in one forward, or decode ahead token by token.

Knows one session's rows and scores; knows no batch and no logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from specserve.errors import no_token
from specserve.model.calls import CallState
from specserve.model.messages import TokenLogprobs, VerifyCall, VerifyReply
from specserve.model.session import KvSession
from specserve.speculation.scoring import RowLogprobs, TargetRow, TargetRowScore


class TargetState(CallState, ABC):
    """A call whose rows the target scores."""

    @abstractmethod
    def target_rows(self) -> list[TargetRow]:
        """Return `num_rows` rows to score, with their keys."""

    @abstractmethod
    def scored(self, scores: Sequence[TargetRowScore], now: float) -> VerifyReply:
        """Build the reply from the scored rows.

        Raises:
            NonFiniteLogits: the first row is unusable.
            InvalidRequest: the request's constraints allow no token at the first row.
        """

    def _check_usable(self, score: TargetRowScore) -> None:
        """Refuse the first row without a token: every round reaches it."""
        if not score.is_usable:
            raise no_token(self.session.session_id, 0, score.replacement_token_id)

    def cancel(self) -> bool:
        """End now: nobody waits for scores, and tokens already sent stay sent."""
        return True


class VerifyState(TargetState):
    """Append and score K >= 1 draft tokens in one forward."""

    def __init__(
        self,
        session: KvSession,
        call: VerifyCall,
        feed: Sequence[int],
        now: float,
        vocab_size: int,
    ) -> None:
        drafts = call.draft_token_ids
        # An invalid id is a rejection: the row before it decides, nothing after it is fed.
        self._num_valid = next(
            (i for i, token in enumerate(drafts) if not 0 <= token < vocab_size), len(drafts)
        )
        super().__init__(session, call, [*feed, *drafts[: self._num_valid]], now)
        self._drafts = drafts
        self._draft_probs = call.draft_probs
        self.num_rows = self._num_valid + 1

    def target_rows(self) -> list[TargetRow]:
        """Return the rows to score, row i under the keys of draft token i."""
        params, start, q = self.session.opening.sampling, self.committed_length, self._draft_probs
        is_constrained = params.constraints is not None
        return [
            TargetRow(
                params,
                start + i,
                start,
                i,
                self._drafts[i] if i < len(self._drafts) else None,
                q.token_ids[i] if q is not None and i < len(self._drafts) else None,
                q.weights[i] if q is not None and i < len(self._drafts) else None,
                self.session.row_edits(start + i) if is_constrained else None,
            )
            for i in range(self.num_rows)
        ]

    def scored(self, scores: Sequence[TargetRowScore], now: float) -> VerifyReply:
        """Answer with K probabilities and K + 1 replacements."""
        self._check_usable(scores[0])
        # Later rows without a token fail the request if the round ends there: the caller's affair.
        # Rows after an invalid draft id cannot be reached; they only keep the shapes.
        padded = [*scores, *[scores[-1]] * (len(self._drafts) + 1 - len(scores))]
        return self.verify_reply(
            [
                score.target_prob if i < self._num_valid else 0.0
                for i, score in enumerate(padded[:-1])
            ],
            tuple(score.replacement_token_id for score in padded),
            _token_logprobs([score.logprobs for score in padded]),
        )


class DecodeState(TargetState):
    """Decode without draft tokens: each emitted token is a round of its own, row 0."""

    num_rows = 1

    def __init__(
        self,
        session: KvSession,
        call: VerifyCall,
        feed: Sequence[int],
        now: float,
        max_length: int,
    ) -> None:
        super().__init__(session, call, feed, now)
        self._num_left = min(call.num_decode_steps, max_length - self.committed_length)

    def target_rows(self) -> list[TargetRow]:
        """Return the row of the token to decode next."""
        length = self.committed_length
        params, edits = self.session.opening.sampling, self.session.row_edits(length)
        return [TargetRow(params, length, length, 0, None, edits=edits)]

    def scored(self, scores: Sequence[TargetRowScore], now: float) -> VerifyReply:
        """Emit one token; `more_follows` tells whether the call goes on."""
        self._check_usable(scores[0])
        token_id = scores[0].replacement_token_id
        self._num_left -= 1
        goes_on = (
            self._num_left > 0 and token_id not in self.session.opening.sampling.stop_token_ids
        )
        reply = self.verify_reply(
            (), (token_id,), _token_logprobs([scores[0].logprobs]), more_follows=goes_on
        )
        if goes_on:
            self.continue_with(token_id)
            self.committed_length += 1
            self.ready_at = now
        return reply


def _token_logprobs(rows: Sequence[RowLogprobs | None]) -> TokenLogprobs | None:
    """Stack K + 1 rows; None when the session wants none."""
    if not rows or rows[0] is None:
        return None
    # A later row without a token has none; the round cannot end behind it.
    wanted = [rows[0] if row is None else row for row in rows]
    return TokenLogprobs(
        draft=np.array([row.draft for row in wanted[:-1]], dtype=np.float32),
        replacement=np.array([row.replacement for row in wanted], dtype=np.float32),
        top_token_ids=np.stack([row.top_token_ids for row in wanted]),
        top=np.stack([row.top for row in wanted]),
    )
