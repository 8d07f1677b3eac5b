"""How many draft tokens a request's next round asks for: most committed tokens per second.

K = 0, decode-ahead, is a choice like any other. Decides from acceptance of verified tokens, from
measured costs and from clocks, never from a token that was drawn and not verified. Knows no model,
no service and no clock of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.speculation.acceptance_rates import PoolAcceptance, RequestAcceptance
from specserve.speculation.cost_model import RoundCosts
from specserve.speculation.length_choice import (
    Choice,
    Option,
    Reason,
    Standing,
    best_of,
    options_of,
)
from specserve.speculation.pool_options import PoolOptions
from specserve.speculation.probe_budget import ProbeBudget

SHORT_STEPS = 4
"""Tokens of decode-ahead where the next decision is wanted soon."""

LEAST_STEPS = 16
"""Fewest tokens of any other decode-ahead call: each may miss a forward of a full batch."""

PLAIN_KNOWN_S = 10.0
"""How long a measurement of decode-ahead holds while drafting is better."""

DISTURBANCE = 0.25
"""Share of a forward by which each token that one session decodes ahead delays every other session
that drafts: its forwards run while theirs come from the draft, who then wait for the next one."""

WARMUP_ROUNDS = 12
"""Rounds of a pool before anything is decided from what they accepted and cost, or showed by coming
to nothing."""

WARMUP_CALLS = 2
"""Calls of decode-ahead before anything is decided from their costs."""


class LengthController:
    """Chooses K for one request."""

    def __init__(
        self,
        pool: PoolAcceptance,
        pool_options: PoolOptions,
        standing: Standing,
        budget: ProbeBudget,
        num_steps_without: int,
    ) -> None:
        """Begin a request.

        Args:
            pool_options: what the requests like this one choose from.
            standing: the choice of the requests like this one, shared by them.
            num_steps_without: tokens decoded ahead in a round to which no draft token comes.
        """
        self.acceptance = RequestAcceptance(pool)
        self._pool = pool
        self._pool_options = pool_options
        self._common = standing
        self._own: Standing | None = None
        """The request's own choice, once it is unlike its pool."""
        self._budget = budget
        self._num_steps_without = num_steps_without
        self._costs: RoundCosts | None = None
        self._options: Sequence[Option] = ()
        self._repeats = False
        self._num_probes = 0

    @property
    def standing_k(self) -> int:
        """The K that stands when nothing is probed; 0 before the first choice."""
        return (self._own or self._common).k or 0

    @property
    def stands_plain(self) -> bool:
        """Whether decode-ahead has been chosen and stands."""
        return (self._own or self._common).k == 0

    @property
    def calm_steps(self) -> int:
        """Tokens to decode ahead until another look is due."""
        return LEAST_STEPS

    @property
    def num_switches(self) -> int:
        """Times that the standing K has changed, this request's own changes included."""
        return self._common.num_switches + (self._own.num_switches if self._own else 0)

    def choose(
        self,
        costs: RoundCosts,
        max_k: int,
        now: float,
        *,
        may_warm_up: bool,
        is_first: bool = False,
        is_ahead: bool = False,
    ) -> Choice:
        """Choose among K = 0 ... max_k >= 1.

        Args:
            may_warm_up: this request may try K > 0 while nothing is known.
            is_first: it is the prompt's round, whose time tells nothing of decode-ahead.
            is_ahead: a probe that is returned is not begun.
        """
        self._costs = costs
        self._budget.accrue(costs.num_sessions, now)
        num_measured = min(costs.num_rounds, self.acceptance.num_pool_rounds)
        if num_measured + costs.num_fruitless < WARMUP_ROUNDS:
            if may_warm_up:
                return Choice(max_k, Reason.WARMUP)
            return Choice(0, Reason.WARMUP, SHORT_STEPS)
        if costs.num_plain < WARMUP_CALLS:
            return Choice(0, Reason.WARMUP, SHORT_STEPS)
        rates = self._pool_options.rates(self._pool, costs)
        options: Sequence[Option]
        if self.acceptance.is_unlike(rates):
            self._own = self._own or Standing(self._common.k)
            expected = self.acceptance.own(rates).expect()
            options = options_of(expected, costs, self._num_steps_without)
        else:
            self._own = None
            options = self._pool_options.options(self._pool, costs, self._num_steps_without)
        self._options = options
        standing = self._own or self._common
        reason = standing.settle(options, now, is_alone=costs.num_sessions == 1)
        if is_first and self.standing_k > 0:
            return Choice(min(self.standing_k, len(options) - 1), reason)
        return self._choose(options, costs, reason, now, is_first=is_first, is_ahead=is_ahead)

    def observe_round(
        self,
        num_asked: int,
        num_draft_tokens: int,
        num_accepted: int,
        wall_s: float,
        *,
        is_probe: bool,
    ) -> None:
        """Learn from a round that asked for draft tokens and did not miss them."""
        self.acceptance.observe(num_asked, num_draft_tokens, num_accepted)
        costs, self._repeats = self._costs, False
        if is_probe and costs is not None and num_draft_tokens > 0:
            k = min(num_draft_tokens, len(costs.round_s) - 1)
            took_s = wall_s
            if costs.num_sessions > 1:
                # Alone among others that do not draft it takes less than if all of them did.
                took_s = max(wall_s + costs.delay_s[k], costs.seconds(k, k))
            done = Option(num_accepted + 1.0, took_s)
            self._budget.spend(done.loss_s(self._stands()))
            # It paid: worth another look at once, waiting for more credit would waste time.
            self._repeats = done.rate > self._stands().rate

    def observe_plain(self, num_tokens: int, wall_s: float, *, is_probe: bool) -> None:
        """Learn from a call of decode-ahead, or from a round whose proposal was missed."""
        self.acceptance.fade(num_tokens)
        if is_probe and self._costs is not None:
            lost_s = Option(num_tokens, wall_s).loss_s(self._stands())
            if self.standing_k > 0:
                lost_s += num_tokens * _disturbance_s(self._costs)
            self._budget.spend(lost_s)
        self._repeats = False

    def _stands(self) -> Option:
        return self._options[min(self.standing_k, len(self._options) - 1)]

    def _choose(
        self,
        options: Sequence[Option],
        costs: RoundCosts,
        reason: Reason,
        now: float,
        *,
        is_first: bool,
        is_ahead: bool,
    ) -> Choice:
        """Take what stands, or look at what is not done at present if the budget allows."""
        k = min(self.standing_k, len(options) - 1)
        if k > 0:
            loss_s = SHORT_STEPS * (options[0].loss_s(options[k]) + _disturbance_s(costs))
            known_at = max(costs.plain_at, self._budget.plain_asked_at)
            is_known = now - known_at < PLAIN_KNOWN_S
            if is_known or self._budget.wait_s(loss_s, costs.num_sessions) > 0:
                return Choice(k, reason)
            if not is_ahead:
                self._budget.plain_asked_at = now
            return Choice(0, Reason.PROBE, SHORT_STEPS)
        k = best_of(options, least_k=1)
        if self._num_probes % 2 and not self._repeats:
            # Else the later positions would keep whatever was first thought of them.
            k = len(options) - 1
        loss_s = options[k].loss_s(options[0]) + costs.delay_s[k]
        wait_s = self._budget.wait_s(loss_s, costs.num_sessions)
        if self._repeats or wait_s == 0:
            self._num_probes += not (is_first or is_ahead)
            return Choice(k, Reason.PROBE)
        return Choice(0, reason, max(LEAST_STEPS, round(wait_s / costs.plain_s)))


def _disturbance_s(costs: RoundCosts) -> float:
    """Return what a token decoded ahead costs the other sessions, together, while they draft."""
    return DISTURBANCE * (costs.num_sessions - 1) * costs.token_s
