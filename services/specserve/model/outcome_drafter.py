"""Drafts ahead, one forward at a time: alone while nothing is asked for, or along with what is.

Joins the outcome cache, its planner, a runner and the sampler. Knows no call in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from specserve.model.batch_record import BatchRecord
from specserve.model.draft_calls import DraftedToken, ProposeState
from specserve.model.draft_confidence import row_confidences
from specserve.model.forward_times import ForwardTimes
from specserve.model.kv_cache import BlockPool
from specserve.model.logit_edits import edited, has_edits
from specserve.model.messages import OutcomeCounts, ProposeCall
from specserve.model.outcome_branch import Branch
from specserve.model.outcome_cache import OutcomeCache
from specserve.model.outcome_plan import AheadForward, AheadPlanner
from specserve.model.overlap_trial import OverlapTrials
from specserve.model.row_top import RowTops
from specserve.model.runner import Runner
from specserve.model.sampler import draw_proposals
from specserve.model.sampler_ops import as_ids
from specserve.model.session import KvSession, RoundBegan
from specserve.speculation.scoring import DraftDraw, DraftRow

_LOOK_AGAIN_S = 1e-3
"""At least so long until rows that were not worth their time are looked at again."""


def draw_tokens(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    rows: Sequence[DraftRow],
    top_k: int,
    *,
    keep_tops: bool,
    with_confidence: bool = False,
) -> tuple[list[DraftedToken], RowTops | None]:
    """Draw a token from each of the first len(rows) rows of logits.

    Args:
        token_ids: [V'] int64 ascending ids of the columns; None where they are the same.
        keep_tops: keep the head of every row, those beyond len(rows) too, to foresee outcomes.
        with_confidence: say how likely the most likely token of each row is.
    """
    confidences = row_confidences(logits[: len(rows)]) if with_confidence else [1.0] * len(rows)
    drafted, tops = _draw(logits, token_ids, rows, top_k, keep_tops=keep_tops)
    return [DraftedToken(draw, tops, i, confidences[i]) for i, draw in enumerate(drafted)], tops


def _draw(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    rows: Sequence[DraftRow],
    top_k: int,
    *,
    keep_tops: bool,
) -> tuple[list[DraftDraw], RowTops | None]:
    if has_edits(rows):
        with edited(logits, rows, None if token_ids is None else as_ids(token_ids)) as plain:
            return _draw(logits, token_ids, plain, top_k, keep_tops=keep_tops)
    tops = RowTops(logits, top_k, token_ids) if keep_tops and len(logits) else None
    draws = draw_proposals(logits[: len(rows)], rows, top_k, token_ids) if rows else []
    return draws, tops


class OutcomeDrafter:
    """The outcome cache at work."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        times: ForwardTimes,
        sessions: Iterable[KvSession],
        *,
        num_outcomes: int,
        draft_sample_top_k: int,
        confidence_threshold: float,
        max_num_rows: int,
        max_length: int,
        record: BatchRecord,
        clock: Callable[[], float],
    ) -> None:
        """Build it.

        Args:
            times: what forwards took, asked ones too.
            sessions: the engine's.
            num_outcomes: most branches of a session.
            max_num_rows: most rows of one forward.
            max_length: most tokens a session may hold.
            record: where it writes down whom it computes.
        """
        self._runner = runner
        self._times = times
        self._sessions = sessions
        self._top_k = draft_sample_top_k
        self._with_confidence = confidence_threshold > 0
        self._record = record
        self._clock = clock
        self._cache = OutcomeCache(
            pool,
            runner.copy_block,
            num_outcomes=num_outcomes,
            max_length=max_length,
            confidence_threshold=confidence_threshold,
        )
        self._planner = AheadPlanner(
            self._cache, max_num_rows=max_num_rows, forward_s=times.expected
        )
        self._trials = OverlapTrials()
        self._look_again_at = 0.0

    @property
    def counts(self) -> OutcomeCounts:
        """What came of it since the start."""
        return self._cache.counts

    @property
    def num_blocks(self) -> int:
        """Blocks that asked work gets as soon as it needs them."""
        return self._cache.num_blocks

    def reclaim(self) -> bool:
        """Free some of these blocks; False when there are none."""
        return self._cache.reclaim()

    def take(self, session: KvSession, call: ProposeCall, now: float) -> Branch | None:
        """Give what was drafted for a call that came at `now`; see OutcomeCache.take."""
        self._note_round(session, call, now)
        return self._cache.take(session, call)

    def look_ahead(self, state: ProposeState) -> None:
        """Take up the round of a call that is being answered, while that pays."""
        began = state.session.round_began
        if began is None:
            return
        if began.was_foreseen:
            self._cache.note_asked(state.forward_s)
        if began.trial.is_on and self._cache.look_ahead(state):
            self._planner.has_work = True
            self._look_again_at = 0.0

    def _note_round(self, session: KvSession, call: ProposeCall, now: float) -> None:
        """Learn how long the round took that this call ends."""
        committed_length = call.keep_length + len(call.append_token_ids)
        began = session.round_began
        if began is not None and began.turn == began.trial.turn:
            began.trial.note(
                now - began.at,
                began.num_speculative_tokens,
                committed_length - began.committed_length,
            )
        num_sessions = sum(other.is_active(now) for other in self._sessions)
        trial = self._trials.of(num_sessions, session.opening.sampling.rule)
        session.round_began = RoundBegan(
            now,
            committed_length,
            call.num_speculative_tokens,
            trial,
            trial.turn,
            session.ahead is not None,
        )

    def wait_s(self) -> float | None:
        """Return how long until there may be something to draft: None for not before a call."""
        if not self._planner.has_work:
            return None
        return max(0.0, self._look_again_at - self._clock())

    def run(self) -> None:
        """Draft one token on each branch that is worth it, in a forward of its own."""
        started_at = self._clock()
        forward = self._planner.plan(self._sessions, started_at)
        if forward is None:
            # Calls are due. Where they stay away, it may be worth it later.
            self._look_again_at = started_at + max(_LOOK_AGAIN_S, self._times.expected(1))
            return
        slices = forward.slices()
        self._record.begin(forward.session_ids)
        logits = self._runner.forward(slices)
        tokens, tops = draw_tokens(
            logits,
            self._runner.columns(slices),
            forward.draft_rows(),
            self._top_k,
            keep_tops=True,
            with_confidence=self._with_confidence,
        )
        ended_at = self._clock()
        self._times.note(len(slices), ended_at - started_at)
        self.take_drawn(forward, tokens, tops, ended_at - started_at)
        self._record.end()

    def riding(self, num_tokens: int, num_calls: int, max_num_rows: int) -> AheadForward | None:
        """Choose rows that go along with a forward that was asked for; see AheadPlanner."""
        return self._planner.plan_riding(num_tokens, num_calls, max_num_rows)

    def take_drawn(
        self,
        forward: AheadForward,
        tokens: Sequence[DraftedToken],
        tops: RowTops | None,
        forward_s: float,
    ) -> None:
        """Give the branches what was drawn for them.

        Args:
            tokens: of the branches' rows, in their order.
            tops: of all rows of the forward; the bonus rows come last.
            forward_s: its time, sampling included.
        """
        for branch, token in zip(forward.branches, tokens, strict=True):
            branch.drawn(token, forward_s)
        self._cache.note_drafted(len(tokens))
        if tops is not None:
            first = tops.num_rows - len(forward.bonus_rounds)
            for row, ahead in enumerate(forward.bonus_rounds, first):
                ahead.bonus_row(tops, row, self._cache.odds)
