"""The walk over settings: one change at a time, and back to the last verified one when it fails."""

import pytest

from specserve.tools.bench.level import LevelPlan, run_level
from specserve.tools.bench.record import Setting
from specserve.tools.bench.sample import Wave
from specserve.tools.bench.sweep import CONCURRENCY, DYNAMIC_K, FIXED_K, Sweep
from specserve.tools.bench.thresholds import Thresholds
from specserve.tools.load.arrivals import Pacing
from support.bench_samples import ScriptedArm, prompt, sample, wave

NUM_PAIRS = 4


class Machine:
    """A machine whose tokens/s by setting the test chooses."""

    def __init__(self, speeds: dict[str, float], failing: str = "") -> None:
        self.speeds = speeds
        self.failing = failing
        self.steps = []

    async def measure(self, setting, last):
        arms = []
        for each in (setting, *([last] if last is not None else [])):
            speed = self.speeds[str(each)]
            # Pairs scatter a little, so that an interval has a width.
            waves = [wave(10, 10 / speed * (1 + 0.01 * (-1) ** pair)) for pair in range(NUM_PAIRS)]
            if str(each) == self.failing:
                waves = [Wave((sample(error="CapacityExhausted: no blocks"),), 1.0)]
            arms.append(ScriptedArm(str(each), waves))
        plan = LevelPlan(Pacing(concurrency=setting.concurrency), NUM_PAIRS, 1)
        return await run_level(arms, [prompt(0)], plan, lambda _: None, lambda *_: None)

    async def sweep(self, concurrencies, k_values, dynamic_k=0, **limits):
        thresholds = Thresholds(max_others_cpu_share=None, **limits)
        walk = Sweep(thresholds, self.measure, self.steps.append)
        return await walk.run(concurrencies, k_values, dynamic_k)

    @property
    def walked(self):
        return [(step.stage, str(step.setting), step.verified) for step in self.steps]


def at(concurrency, k, *, dynamic=False):
    return str(Setting(concurrency, k, dynamic))


async def test_concurrency_then_fixed_k_then_dynamic_k():
    machine = Machine(
        {
            at(1, 0): 100,
            at(2, 0): 180,
            at(4, 0): 183,
            at(2, 1): 200,
            at(2, 2): 250,
            at(2, 4): 220,
            at(2, 4, dynamic=True): 260,
        }
    )

    chosen = await machine.sweep([1, 2, 4], [1, 2, 4], dynamic_k=4)

    assert machine.walked == [
        (CONCURRENCY, at(1, 0), True),
        (CONCURRENCY, at(2, 0), True),
        (CONCURRENCY, at(4, 0), False),
        (FIXED_K, at(2, 1), True),
        (FIXED_K, at(2, 2), True),
        (FIXED_K, at(2, 4), False),
        (DYNAMIC_K, at(2, 4, dynamic=True), True),
    ]
    assert chosen == Setting(2, 4, dynamic=True)
    assert "no more than 180.0 before" in machine.steps[2].reason
    assert str(machine.steps[5].kept) == at(2, 2)


async def test_a_failed_step_returns_to_the_last_verified_setting():
    """The step after a failed one goes on from what was verified, not from what failed."""
    speeds = {at(1, 0): 100, at(1, 2): 150, at(1, 4): 400, at(1, 6): 160}
    machine = Machine(speeds, failing=at(1, 4))

    chosen = await machine.sweep([1], [2, 4, 6])

    assert chosen == Setting(1, 6)
    assert not machine.steps[2].verified
    assert str(machine.steps[2].kept) == at(1, 2)
    assert machine.steps[3].ratio.value == pytest.approx(160 / 150, rel=1e-3)


async def test_concurrency_stops_at_the_first_failure():
    """Higher ones are not tried: the machine has said no."""
    machine = Machine({at(1, 0): 100, at(2, 0): 0.0001, at(4, 0): 400}, failing=at(2, 0))

    chosen = await machine.sweep([1, 2, 4], [])

    assert chosen == Setting(1, 0)
    assert len(machine.steps) == 2


async def test_a_limit_in_seconds_fails_a_step():
    machine = Machine({at(1, 0): 150, at(2, 0): 100})

    chosen = await machine.sweep([1, 2], [], max_tpot_p95_s=0.009)

    assert chosen == Setting(1, 0)
    assert "max_tpot_p95_s 0.009: 0.010" in machine.steps[1].reason


async def test_nothing_is_chosen_when_nothing_works():
    machine = Machine({at(1, 0): 100}, failing=at(1, 0))

    assert await machine.sweep([1], [2]) is None
    assert "max_failed_share" in machine.steps[0].reason


@pytest.mark.parametrize(("speed", "verified"), [(98, True), (96, False)])
async def test_dynamic_k_may_cost_a_little(speed, verified):
    """It adapts to loads that were not tried, so it may be 3 % slower at the one that was."""
    machine = Machine({at(1, 0): 100, at(1, 4, dynamic=True): speed})

    chosen = await machine.sweep([1], [], dynamic_k=4)

    assert (chosen == Setting(1, 4, dynamic=True)) is verified
