"""What targets could use of a draft, by what was measured, and not by what a slow one does."""

from __future__ import annotations

import pytest

from specserve.config import OrchestratorConfig
from specserve.orchestrator.length_control import LengthControl
from specserve.orchestrator.request_state import RequestState
from specserve.speculation.cost_model import Load, PlainTiming, RoundTiming
from specserve.speculation.digest import TokenChain
from specserve.speculation.draft_demand import fast_draft_length
from specserve.speculation.length_choice import Option, SpeculationMode
from specserve.speculation.length_controller import LengthController
from specserve.speculation.types import AcceptanceRule, SamplingParams

STEP_S = 0.02
K = 8


def options(*rates: float) -> list[Option]:
    return [Option(rate, 1.0) for rate in rates]


def test_least_length_that_is_nearly_the_best_is_demanded() -> None:
    """And none where even a draft that takes no time is worth less than its place."""
    assert fast_draft_length(options(1.0, 1.6, 1.99, 2.0)) == 2
    assert fast_draft_length(options(1.0, 1.03, 1.04)) == 0
    assert fast_draft_length(options(2.0, 1.0)) == 0


class Learned:
    """A control that has seen rounds of two running requests, on a slow draft."""

    def __init__(self, *, schedule: str, num_accepted: int, draft_s: float) -> None:
        speculative = {
            "model": "draft",
            "num_speculative_tokens": K,
            "num_speculative_tokens_schedule": schedule,
        }
        self.now = 100.0
        self.control = LengthControl(
            OrchestratorConfig.model_validate({"speculative": speculative}), lambda: self.now
        )
        opened = [self._open() for _ in range(2)]
        controllers = [controller for controller in opened if controller is not None]
        assert len(controllers) == 2
        pool = self.control.pool("draft_model")
        for _ in range(40):
            for controller in controllers:
                self._round(pool, controller, num_accepted, draft_s)
                self.now += STEP_S

    def _open(self) -> LengthController | None:
        sampling = SamplingParams(AcceptanceRule.GREEDY, 0, 0, temperature=0.0)
        state = RequestState("r", "s", sampling, 3, 99, 999, K, TokenChain((1, 2, 3)))
        state.method = "draft_model"
        return self.control.open(state, b"", 4)

    def _round(self, pool, controller, num_accepted, draft_s) -> None:  # type: ignore[no-untyped-def]
        timing = RoundTiming(
            num_draft_tokens=K,
            wall_s=draft_s + STEP_S,
            draft_wait_s=draft_s,
            draft_queue_s=0.0,
            draft_forward_s=draft_s,
            draft_rows=2,
            num_hidden_tokens=0,
            verify_queue_s=0.0,
            verify_forward_s=STEP_S,
            verify_rows=2 * (K + 1),
        )
        pool.observe_round(controller, timing, K, num_accepted, Load(2, 2), self.now)
        plain = PlainTiming(4, 4 * STEP_S, STEP_S, ((2, STEP_S),) * 4)
        pool.observe_plain(controller, plain, 0.0, self.now)


@pytest.mark.parametrize("draft_s", [0.001, 5.0])
def test_demand_does_not_hang_on_how_fast_drafts_are(draft_s: float) -> None:
    """A draft that takes five seconds a round has its K talked down, but not its pool."""
    learned = Learned(schedule="auto", num_accepted=K, draft_s=draft_s)
    assert learned.control.draft_demand(2) == pytest.approx(2.0, abs=0.3)
    shorter = Learned(schedule="auto", num_accepted=1, draft_s=draft_s)
    assert 0 < shorter.control.draft_demand(2) < 1.0


def test_drafts_whose_tokens_are_never_accepted_are_not_demanded() -> None:
    """Nor are any where speculation is off; with a constant K each session counts whole."""
    useless = Learned(schedule="auto", num_accepted=0, draft_s=0.001)
    assert useless.control.draft_demand(2) == 0.0
    assert useless.control.num_draftable == 2  # and may be tried on again
    constant = Learned(schedule="constant", num_accepted=0, draft_s=0.001)
    assert constant.control.draft_demand(2) == 2.0
    assert constant.control.num_draftable == 0
    constant.control.switch(SpeculationMode.OFF)
    assert constant.control.draft_demand(2) == 0.0


def test_nothing_known_demands_a_draft_to_learn_from() -> None:
    """A pool scaled to none could else never be found worth anything."""
    fresh = Learned(schedule="auto", num_accepted=0, draft_s=0.0)
    unknown = LengthControl(fresh.control.config, lambda: 0.0)
    fresh.control = unknown
    held = [fresh._open() for _ in range(3)]
    assert len(held) == 3
    assert unknown.draft_demand(3) == 3.0
