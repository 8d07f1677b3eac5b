"""What the requests on one target and one draft have learned together, and their controllers.

Knows the controllers that live and what each last did; knows no request, no service, no network.
"""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

from specserve.speculation.acceptance_rates import PoolAcceptance
from specserve.speculation.cost_model import (
    CostModel,
    Load,
    PlainTiming,
    RoundTiming,
)
from specserve.speculation.length_choice import Choice, Standing
from specserve.speculation.length_controller import LengthController
from specserve.speculation.pool_options import PoolOptions
from specserve.speculation.probe_budget import ProbeBudget
from specserve.speculation.step_curve import StepCurve

NEARLY_ALL = 0.75
"""Share of the sessions that draft from which on they are taken to act as one."""

MOST_WARMING_UP = 8
"""Requests that draft at once while nothing is known yet of what it costs."""

STEADY_ROUNDS = 4
"""Rounds after that which are not yet taken as what drafting costs them all."""


class LengthPool:
    """Costs, standing choices and the probing budget that requests share."""

    def __init__(self, now: float, *, target_curve: StepCurve | None = None) -> None:
        self.costs = CostModel(target_curve)
        self.budget = ProbeBudget(now)
        self._standings: WeakKeyDictionary[PoolAcceptance, dict[int, Standing]]
        self._standings = WeakKeyDictionary()
        self._options: WeakKeyDictionary[PoolAcceptance, dict[int, PoolOptions]]
        self._options = WeakKeyDictionary()
        self._last_k: dict[LengthController, int] = {}  # {controller: K of its last round}
        self._num_by_k: Counter[int] = Counter()
        self._drafting_since: float | None = None
        """Since when nearly all of several requests have had K > 0."""

    @property
    def num_requests(self) -> int:
        """Requests that run."""
        return len(self._last_k)

    def open(
        self, acceptance: PoolAcceptance, num_steps_without: int, max_k: int, now: float
    ) -> LengthController:
        """Begin a request that may ask for `max_k` draft tokens."""
        if not self._last_k:
            self.budget.begin(now)
        standing = self.standing(acceptance, max_k)
        options = self._options.setdefault(acceptance, {})
        if max_k not in options:
            options[max_k] = PoolOptions(max_k)
        controller = LengthController(
            acceptance, options[max_k], standing, self.budget, num_steps_without
        )
        self._last_k[controller] = 0
        self._num_by_k[0] += 1
        return controller

    def standing(self, acceptance: PoolAcceptance, max_k: int) -> Standing:
        """Return the choice that the requests of one kind share."""
        return self._standings.setdefault(acceptance, {}).setdefault(max_k, Standing())

    def close(self, controller: LengthController) -> None:
        """End a request. Idempotent."""
        k = self._last_k.pop(controller, None)
        if k is not None:
            self._num_by_k[k] -= 1

    def load(
        self,
        controller: LengthController,
        num_sessions: int,
        num_draft_sessions: int,
        now: float,
    ) -> Load:
        """Describe who is there, given what target and draft report of themselves."""
        own = max(1, len(self._last_k))
        k = self._last_k.get(controller, 0)
        all_draft = (
            k > 0
            and controller.standing_k > 0  # it was chosen by costs, which are then known
            and self._drafting_since is not None
            and now - self._drafting_since >= STEADY_ROUNDS * self.costs.last_round_s(k)
        )
        return Load(max(own, num_sessions), max(1, num_draft_sessions), all_draft)

    def choose(
        self,
        controller: LengthController,
        load: Load,
        max_k: int,
        num_steps: int,
        now: float,
        *,
        is_first: bool = False,
        is_ahead: bool = False,
    ) -> Choice:
        """Choose K for a request's next round.

        Args:
            is_first: that is its prompt's.
            is_ahead: the round before it has not ended; a probe is then named, and not begun.
        """
        costs = self.costs.costs(load, max_k, num_steps, now)
        # Rounds that were begun may come to nothing: only those that run are counted.
        num_drafting = len(self._last_k) - self._num_by_k[0]
        may_warm_up = self._last_k.get(controller, 0) > 0 or num_drafting < MOST_WARMING_UP
        return controller.choose(
            costs, max_k, now, may_warm_up=may_warm_up, is_first=is_first, is_ahead=is_ahead
        )

    def note(self, controller: LengthController, num_speculative_tokens: int, now: float) -> None:
        """Remember what a request's round really does."""
        k = self._last_k.get(controller)
        if k is not None and k != num_speculative_tokens:
            self._num_by_k[k] -= 1
            self._num_by_k[num_speculative_tokens] += 1
            self._last_k[controller] = num_speculative_tokens
        own = len(self._last_k)
        if own < 2 or own - self._num_by_k[0] < NEARLY_ALL * own:
            self._drafting_since = None
        elif self._drafting_since is None:
            self._drafting_since = now

    def observe_round(
        self,
        controller: LengthController,
        timing: RoundTiming,
        num_asked: int,
        num_accepted: int,
        load: Load,
        now: float,
        *,
        is_probe: bool = False,
    ) -> None:
        """Learn from a round whose draft tokens were verified; `is_probe` if it was a probe."""
        self.costs.observe_round(timing, load, now)
        controller.observe_round(
            num_asked, timing.num_draft_tokens, num_accepted, timing.wall_s, is_probe=is_probe
        )

    def observe_plain(
        self,
        controller: LengthController,
        timing: PlainTiming,
        waited_s: float,
        now: float,
        *,
        is_probe: bool = False,
    ) -> None:
        """Learn from a call of decode-ahead, and from a proposal that was waited for in vain."""
        self.costs.observe_plain(timing, now)
        controller.observe_plain(timing.num_tokens, timing.wall_s + waited_s, is_probe=is_probe)

    def observe_empty(
        self, controller: LengthController, timing: PlainTiming, num_asked: int, now: float
    ) -> None:
        """Learn from a round whose proposer had nothing to say, and which decoded ahead."""
        self.costs.num_fruitless += 1
        self.costs.observe_plain(timing, now)
        controller.observe_round(num_asked, 0, 0, timing.wall_s, is_probe=False)
