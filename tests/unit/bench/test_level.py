"""One load level: who runs when, what is compared, and what a cut-short level keeps."""

import asyncio
from collections import Counter

import pytest

from specserve.tools.bench.level import LevelPlan, order_of, run_level
from specserve.tools.bench.workload import plan_level
from specserve.tools.load.arrivals import Pacing
from support.bench_samples import ScriptedArm, prompt, wave

PROMPTS = [prompt(number) for number in range(4)]
ONE = Pacing(concurrency=1)


def ignore(*_: object) -> None:
    """Take anything."""


def names(count):
    return [ScriptedArm(f"arm{index}", [wave(1, 1.0)]) for index in range(count)]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_side_is_first_equally_often(count):
    """Whatever a busy machine does to the first of a pair, it does to all sides alike."""
    arms = names(count)

    firsts = Counter(order_of(arms, pair)[0].name for pair in range(2 * count))

    assert set(firsts.values()) == {2}
    assert all(
        sorted(a.name for a in order_of(arms, p)) == [a.name for a in arms] for p in range(9)
    )


def test_two_sides_alternate():
    arms = names(2)

    assert [order_of(arms, pair)[0].name for pair in range(4)] == ["arm0", "arm1", "arm0", "arm1"]


async def test_both_sides_decode_the_same_prompts_in_every_pair():
    log = []
    left = ScriptedArm("left", [wave(8, 1.0)], log)
    right = ScriptedArm("right", [wave(8, 2.0)], log)

    plan = LevelPlan(Pacing(concurrency=2), 4, 2)
    level = await run_level([left, right], PROMPTS, plan, ignore, ignore)

    assert left.asked == right.asked == [["p0", "p1"], ["p2", "p3"], ["p0", "p1"], ["p2", "p3"]]
    assert log == ["left", "right", "right", "left", "left", "right", "right", "left"]
    assert len(set(left.labels + right.labels)) == 8, "request ids must never repeat"
    assert level.prompts_reused
    comparison = level.comparison("left", "right")
    assert comparison is not None
    assert comparison.ratio is not None
    assert (comparison.ratio.value, comparison.ratio.count) == (2.0, 4)
    assert comparison.halves == (2.0, 2.0)
    assert comparison.half_difference == 0.0


async def test_sides_change_turns_after_every_request_that_runs_alone():
    """A machine that slows down in the middle of a pair slows all its sides down alike."""
    log = []
    left = ScriptedArm("left", [wave(8, 1.0), wave(8, 2.0)], log)
    right = ScriptedArm("right", [wave(8, 2.0)], log)

    level = await run_level([left, right], PROMPTS, LevelPlan(ONE, 2, 2), ignore, ignore)

    assert left.asked == right.asked == [["p0"], ["p1"], ["p2"], ["p3"]]
    assert log == ["left", "right", "right", "left", "left", "right", "right", "left"]
    assert len(set(left.labels + right.labels)) == 8, "request ids must never repeat"
    comparison = level.comparison("left", "right")
    assert comparison is not None
    assert comparison.ratio is not None
    assert comparison.ratio.count == 2, "a pair is all of its turns"
    assert comparison.ratio.value == pytest.approx(8.0 / 6.0)


async def test_a_pair_before_the_measured_ones_counts_nowhere():
    """The side that has to learn the load takes ten times as long at first."""
    left = ScriptedArm("left", [wave(8, 10.0), wave(8, 1.0), wave(8, 1.0)])
    right = ScriptedArm("right", [wave(8, 2.0)])

    plan = LevelPlan(ONE, 2, 1, num_unmeasured=1)
    level = await run_level([left, right], PROMPTS, plan, ignore, ignore)

    assert left.asked == [["p0"], ["p0"], ["p1"]]
    assert len(set(left.labels)) == 3
    comparison = level.comparison("left", "right")
    assert comparison is not None
    assert comparison.ratio is not None
    assert (comparison.ratio.value, comparison.ratio.count) == (2.0, 2)


async def test_halves_that_disagree_are_told():
    """A machine that changes in the middle of a run shows in the halves' ratios."""
    left = ScriptedArm("left", [wave(8, 1.0), wave(8, 1.0), wave(8, 2.0), wave(8, 2.0)])
    right = ScriptedArm("right", [wave(8, 2.0)])

    level = await run_level([left, right], PROMPTS, LevelPlan(ONE, 4, 1), ignore, ignore)

    comparison = level.comparison("left", "right")
    assert comparison is not None
    assert comparison.halves == (2.0, 1.0)
    assert comparison.half_difference == pytest.approx(1.0)
    assert not level.prompts_reused


async def test_a_level_that_is_cut_short_keeps_its_whole_pairs():
    """A pair of which one side is missing compares nothing, and is left out."""
    kept = []
    left = ScriptedArm("left", [wave(8, 1.0)])

    class Stops(ScriptedArm):
        async def run(self, prompts, pacing, label):
            if len(self.asked) == 2:
                raise asyncio.CancelledError
            return await super().run(prompts, pacing, label)

    right = Stops("right", [wave(8, 2.0)])

    with pytest.raises(asyncio.CancelledError):
        await run_level([left, right], PROMPTS, LevelPlan(ONE, 4, 1), kept.append, ignore)

    (level,) = kept
    assert (level.num_pairs, level.complete) == (2, False)
    assert [arm.summary.num_requests for arm in level.arms] == [2, 2]


async def test_nothing_is_kept_of_a_level_without_a_whole_pair():
    kept = []

    class Stops(ScriptedArm):
        async def run(self, prompts, pacing, label):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run_level([Stops("a", [])], PROMPTS, LevelPlan(ONE, 1, 1), kept.append, ignore)

    assert kept == []


@pytest.mark.parametrize(
    ("pacing", "num_prompts", "pairs", "per_wave", "expected"),
    [
        (Pacing(concurrency=1), 96, None, None, (96, 1)),
        (Pacing(concurrency=32), 96, None, None, (6, 32)),
        (Pacing(concurrency=4), 96, None, None, (24, 4)),
        (Pacing(concurrency=4), 96, 3, 8, (3, 8)),
        (Pacing(arrival_rate=2.0), 10, None, None, (6, 10)),
    ],
)
def test_prompts_are_split_into_pairs(pacing, num_prompts, pairs, per_wave, expected):
    plan = plan_level(pacing, num_prompts, pairs, per_wave)

    assert (plan.num_pairs, plan.requests_per_wave) == expected
