"""What to draft ahead in the next forward: which rows, and whether they are worth their time.

Knows rounds, odds and measured times; knows no logits and no blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specserve.model.outcome_branch import Branch
from specserve.model.outcome_cache import OutcomeCache
from specserve.model.outcome_odds import Outcome
from specserve.model.outcome_round import RoundAhead
from specserve.model.overlap import expected_wait_s, num_riding_rows, num_rows_worth
from specserve.model.runner import SequenceSlice
from specserve.model.session import KvSession
from specserve.speculation.scoring import DraftRow

_BONUS_ROW_WORTH = 0.7
"""Share of full acceptances whose bonus token is foreseen from its row."""

_PROBE_EVERY = 32
"""Every so many forwards all rows are taken: else a stale measurement would never be corrected."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One row that could be computed."""

    probability: float
    """That its outcome comes true."""
    ahead: RoundAhead
    branch: Branch | None
    """None to start one, or for the bonus row."""
    outcome: Outcome | None
    """To start a branch for."""


@dataclass(frozen=True, slots=True)
class AheadForward:
    """The rows of one forward; their blocks are ready to be written."""

    branches: list[Branch]
    """Their rows come first; a token is drawn from each."""
    bonus_rounds: list[RoundAhead]
    """Rounds whose bonus row is computed with them; nothing is drawn from it."""

    @property
    def session_ids(self) -> list[str]:
        """Name the session of each row."""
        return [branch.session_id for branch in self.branches] + [
            ahead.session.session_id for ahead in self.bonus_rounds
        ]

    def slices(self) -> list[SequenceSlice]:
        """Return the batch."""
        return [branch.slice() for branch in self.branches] + [
            SequenceSlice(
                [ahead.last_token_id],
                ahead.last_position,
                [] if ahead.session.blocks is None else ahead.session.blocks.blocks,
                num_logit_rows=1,
                context_ids=ahead.session.more_ids,
            )
            for ahead in self.bonus_rounds
        ]

    def draft_rows(self) -> list[DraftRow]:
        """Return the keys of the tokens to draw."""
        return [branch.draft_row() for branch in self.branches]


class AheadPlanner:
    """Choose what to draft ahead."""

    def __init__(
        self, cache: OutcomeCache, *, max_num_rows: int, forward_s: Callable[[int], float]
    ) -> None:
        """Build a planner.

        Args:
            max_num_rows: most rows of one forward.
            forward_s: expected time of a forward with so many rows; 0 while unknown.
        """
        self._cache = cache
        self._max_num_rows = max_num_rows
        self._forward_s = forward_s
        self._num_planned = 0
        self.has_work = False
        """Whether rows are left that could be computed; set by who adds a round."""

    def plan(self, sessions: Iterable[KvSession], now: float) -> AheadForward | None:
        """Choose a forward that nobody asked for; None where none is worth its time."""
        steps = self._steps(self._max_num_rows)
        self.has_work = bool(steps)
        self._num_planned += 1
        if self._num_planned % _PROBE_EVERY:
            steps = steps[: num_rows_worth([s.probability for s in steps], self._forward_s)]
        if not steps or not self._is_worth(steps, sessions, now):
            return None
        return self._prepare(steps)

    def plan_riding(
        self, num_tokens: int, num_calls: int, max_num_rows: int
    ) -> AheadForward | None:
        """Choose rows that go along with a forward that was asked for.

        Args:
            num_tokens: tokens of that forward.
            num_calls: calls that wait for it.
            max_num_rows: rows for which there is room in it.
        """
        if not self.has_work:
            return None
        steps = self._steps(max_num_rows)
        odds = [step.probability for step in steps]
        count = num_riding_rows(odds, num_tokens, num_calls, self._forward_s)
        return self._prepare(steps[:count])

    def _prepare(self, steps: list[_Step]) -> AheadForward | None:
        """Make the blocks of the steps writable; leave out those that get none."""
        branches: list[Branch] = []
        bonus_rounds: list[RoundAhead] = []
        for step in steps:
            if step.branch is not None:
                if self._cache.extend(step.branch):
                    branches.append(step.branch)
                else:
                    step.branch.stop()
            elif step.outcome is not None:
                if not step.ahead.candidates():
                    continue  # given up a moment ago
                branch = self._cache.new_branch(step.ahead, step.outcome)
                if branch is None:
                    step.ahead.give_up()
                else:
                    branches.append(branch)
            elif self._cache.extend_session(step.ahead):
                bonus_rounds.append(step.ahead)
            else:
                step.ahead.give_up_bonus()
        return AheadForward(branches, bonus_rounds) if branches or bonus_rounds else None

    def _steps(self, max_num_rows: int) -> list[_Step]:
        """Return the rows that could be computed now, likeliest first."""
        steps: list[_Step] = []
        for ahead in self._cache.rounds:
            ahead.foresee(self._cache.odds)
            if ahead.wants_bonus_row:
                odds = _BONUS_ROW_WORTH * ahead.full_acceptance
                steps.append(_Step(odds, ahead, None, None))
            steps += [
                _Step(branch.outcome.probability, ahead, branch, None)
                for branch in ahead.branches
                if branch.is_open
            ]
            steps += [
                _Step(outcome.probability, ahead, None, outcome) for outcome in ahead.candidates()
            ]
        steps.sort(key=lambda step: -step.probability)
        return steps[:max_num_rows]

    def _is_worth(self, steps: list[_Step], sessions: Iterable[KvSession], now: float) -> bool:
        """Compare what the rows save with what asked work will wait for them.

        A row of an outcome that comes true saves its call one forward.
        """
        forward_s = self._forward_s(len(steps))
        saved_s = sum(step.probability for step in steps) * self._forward_s(1)
        waits = (expected_wait_s(session.due_in_s(now), forward_s) for session in sessions)
        return forward_s == 0.0 or saved_s > sum(waits)
