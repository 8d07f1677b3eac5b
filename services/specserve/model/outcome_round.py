"""The outcomes of one session's running verify call: which there are, which are drafted ahead.

Begins when a Propose call is answered, ends with the session's next call. What a branch has drawn
decides nothing here: not which branches are kept, nor how far each gets, nor which comes first
(design, section 3). Knows one session; knows no batch and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.model.draft_calls import DraftedToken
from specserve.model.messages import ProposeCall
from specserve.model.outcome_branch import Branch
from specserve.model.outcome_odds import Outcome, OutcomeOdds
from specserve.model.row_top import RowTops
from specserve.model.session import KvSession
from specserve.speculation.outcomes import RowForecast, foresee_row
from specserve.speculation.scoring import DraftRow


class RoundAhead:
    """One answered round, looked ahead of."""

    def __init__(
        self,
        session: KvSession,
        committed_length: int,
        drafted: Sequence[DraftedToken],
        num_speculative_tokens: int,
        num_branches: int,
    ) -> None:
        """Compute nothing yet: the reply must leave first.

        Args:
            committed_length: of the round that was answered.
            drafted: its draft tokens, at least one.
            num_speculative_tokens: K asked for, which the next call will probably ask for too.
            num_branches: most outcomes to draft for.
        """
        self.session = session
        self.committed_length = committed_length
        self.num_speculative_tokens = num_speculative_tokens
        self.branches: list[Branch] = []
        self.is_over = False
        self._drafted = drafted
        self._params = session.opening.sampling
        self._num_branches = num_branches
        self._rows: list[RowForecast] | None = None
        self._bonus: RowForecast | None = None
        self._candidates: list[Outcome] = []
        self._full_acceptance = 0.0
        self._gave_up_bonus = False

    @property
    def last_position(self) -> int:
        """Position of the last draft token."""
        return self.committed_length + len(self._drafted) - 1

    @property
    def wants_bonus_row(self) -> bool:
        """Whether the row behind the last draft token is still to be computed."""
        return (
            self._bonus is None
            and not self._gave_up_bonus
            and self.session.cached_length == self.last_position
        )

    @property
    def last_token_id(self) -> int:
        """The last draft token: its KV is what the bonus row needs."""
        return self._drafted[-1].draw.token_id

    @property
    def full_acceptance(self) -> float:
        """Probability that every draft token is accepted."""
        return self._full_acceptance

    def foresee(self, odds: OutcomeOdds) -> None:
        """Rank the outcomes that end at a draft row, if not done before."""
        if self._rows is not None:
            return
        self._rows = [
            self._foresee(i, token.tops, token.row, token.draw.token_id)
            for i, token in enumerate(self._drafted)
        ]
        rule = self._params.rule
        self._full_acceptance = odds.acceptances(rule, self._rows)[-1]
        unseen = odds.unseen_bonuses(rule, self._full_acceptance) if self.wants_bonus_row else []
        outcomes = odds.rejections(rule, self._rows)
        # Places are left for the bonus tokens that would be among the likeliest.
        ranked = sorted([outcome.probability for outcome in outcomes] + unseen, reverse=True)
        least = ranked[min(self._num_branches, len(ranked)) - 1] if ranked else 0.0
        num_left = sum(probability >= least for probability in unseen)
        self._candidates = outcomes[: max(0, self._num_branches - num_left)]

    def bonus_row(self, tops: RowTops, row: int, odds: OutcomeOdds) -> None:
        """Take the row behind the last draft token, whose KV the session now holds."""
        self.session.chain.append([self.last_token_id])
        self._bonus = self._foresee(len(self._drafted), tops, row, None)
        self._candidates += odds.bonuses(
            self._params.rule, self._full_acceptance, len(self._drafted), self._bonus
        )
        self._candidates.sort(key=lambda outcome: -outcome.probability)

    def candidates(self) -> Sequence[Outcome]:
        """Return the outcomes that may still get a branch, likeliest first."""
        return self._candidates[: max(0, self._num_branches - len(self.branches))]

    def begin(self, branch: Branch) -> None:
        """Take a branch up for one of the candidates."""
        self._candidates.remove(branch.outcome)
        self.branches.append(branch)

    def give_up(self) -> None:
        """Start no more branches."""
        self._candidates.clear()

    def give_up_bonus(self) -> None:
        """Do without the bonus row."""
        self._gave_up_bonus = True

    def drop(self, branch: Branch) -> None:
        """Free one branch."""
        branch.tail.release()
        self.branches.remove(branch)

    def truncated(self, length: int) -> None:
        """Hear that the session keeps `length` tokens: no branch may stand on more."""
        if length < self.committed_length:
            self.end()
        for branch in [b for b in self.branches if b.base_length > length]:
            self.drop(branch)

    def end(self) -> None:
        """Free everything. Idempotent."""
        self.is_over = True
        self.give_up()
        while self.branches:
            self.drop(self.branches[-1])
        if self.session.ahead is self:
            self.session.ahead = None

    def outcome_of(self, call: ProposeCall) -> tuple[int, int] | None:
        """Read from the next call how the round ended: (draft tokens accepted, last token).

        The call was let in: its session holds what it keeps, and what it appends as far as that
        was held. None when it is not the round after this one.
        """
        held = self.session.cached_length
        end = call.keep_length + len(call.append_token_ids)
        if held < self.committed_length or end <= self.committed_length:
            return None
        committed = self.session.chain.slice(self.committed_length, min(held, end))
        committed += call.append_token_ids[held - call.keep_length :]
        num_accepted = len(committed) - 1
        drafted = [token.draw.token_id for token in self._drafted[:num_accepted]]
        return (num_accepted, committed[-1]) if drafted == committed[:-1] else None

    def find(self, num_accepted: int, token_id: int) -> Branch | None:
        """Return the branch of an outcome, if anything was drafted on it."""
        for branch in self.branches:
            outcome = branch.outcome
            if (outcome.row, outcome.token_id) == (num_accepted, token_id) and branch.drafted:
                # The session was cut to what the call keeps and to what it appends and was held.
                return branch if branch.base_length == self.session.cached_length else None
        return None

    def learn(self, num_accepted: int, token_id: int, odds: OutcomeOdds) -> None:
        """Count how the round ended, if it was looked at."""
        if self._rows is not None:
            odds.learn(self._params.rule, self._rows, self._bonus, num_accepted, token_id)

    def _foresee(
        self, row: int, tops: RowTops | None, index: int, draft_token_id: int | None
    ) -> RowForecast:
        if tops is None:
            return RowForecast(0.0, (), ())
        keys = DraftRow(self._params, self.committed_length + row, self.committed_length, row)
        return foresee_row(*tops.row(index), keys, draft_token_id, self._num_branches)
