"""Thresholds, and the decision matrix that follows from them."""

import json

import pytest

from specserve.errors import ConfigurationError
from specserve.tools.bench.decision import SPECULATIVE, TARGET_ONLY, decide, speedup
from specserve.tools.bench.level import LevelPlan, run_level
from specserve.tools.bench.sample import Wave
from specserve.tools.bench.thresholds import Thresholds, read_thresholds
from specserve.tools.load.arrivals import Pacing
from support.bench_samples import ScriptedArm, prompt, sample, wave

ALONE = Pacing(concurrency=1)
QUIET = {"max_others_cpu_share": None}
"""Tests run on busy machines, and what is judged here is scripted."""


async def measured(on, off, *, credit=None, pairs=6, pacing=ALONE):
    """Run scripted waves, in turns, as one level."""
    arms = [ScriptedArm(SPECULATIVE, on), ScriptedArm(TARGET_ONLY, off)]
    plan = LevelPlan(pacing, pairs, 1, credit)
    return await run_level(arms, [prompt(0)], plan, lambda _: None, lambda *_: None)


async def judged(level, memory_ratio=None, **limits):
    decision = decide([level], Thresholds(**{**QUIET, **limits}), memory_ratio)
    return decision.verdict, {check.name: check for check in decision.levels[0].checks}, decision


async def test_a_clear_gain_enables():
    level = await measured([wave(10, 1.0)], [wave(10, 2.0)])

    verdict, checks, _ = await judged(level)

    assert verdict == "enable"
    assert checks["min_speedup"].value == pytest.approx(2.0)
    assert checks["max_e2e_p95_ratio"].value == pytest.approx(0.5)


async def test_the_lower_end_of_the_interval_decides():
    """A gain of a tenth in the mean, with pairs that scatter by more, is no gain yet."""
    on = [wave(10, seconds) for seconds in (0.6, 1.4, 0.7, 1.3, 0.6, 1.2)]
    level = await measured(on, [wave(10, 1.1)])

    verdict, checks, decision = await judged(level, max_half_difference=1.0)

    assert level.comparison(SPECULATIVE, TARGET_ONLY).ratio.value > 1.05
    assert not checks["min_speedup"].holds
    assert verdict == "keep target-only"
    assert any("min_speedup" in reason for reason in decision.levels[0].reasons)


async def test_target_only_is_credited_with_padded_steps():
    """Where a padded step is faster than one row, that much of the gain is the kernel's."""
    level = await measured([wave(10, 1.0)], [wave(10, 1.2)], credit=1.2)

    assert speedup(level).value == pytest.approx(1.0)
    verdict, _, _ = await judged(level)
    assert verdict == "keep target-only"


@pytest.mark.parametrize(("on_s", "expected"), [(0.6, "enable"), (1.0, "keep target-only")])
async def test_in_open_loop_a_request_s_time_is_judged(on_s, expected):
    """Tokens/s are those that arrive, with speculation and without."""
    on, off = (
        Wave((sample(sizes=(1,) * 5, gap_s=seconds / 5, drafted=(), accepted=()),), 10.0)
        for seconds in (on_s, 1.0)
    )
    level = await measured([on], [off], pacing=Pacing(arrival_rate=0.1))

    verdict, checks, _ = await judged(level)

    assert checks["min_speedup"].value == pytest.approx(1.0 / on_s)
    assert verdict == expected


async def test_one_pair_cannot_enable():
    level = await measured([wave(10, 1.0)], [wave(10, 2.0)], pairs=1)

    verdict, checks, _ = await judged(level)

    assert checks["min_speedup"].value is None
    assert verdict == "keep target-only"


@pytest.mark.parametrize(
    ("limits", "memory_ratio", "expected"),
    [
        ({"max_memory_ratio": 1.2}, 1.5, "keep target-only"),
        ({"max_memory_ratio": 1.2}, 1.1, "enable"),
        ({"max_memory_ratio": 1.2}, None, "keep target-only"),
        ({"max_ttft_p95_s": 0.05}, None, "keep target-only"),
        ({"max_ttft_p95_ratio": 0.4}, None, "keep target-only"),
        ({"max_ttft_p95_ratio": None, "max_itl_p99_ratio": 0.6}, None, "enable"),
        ({"min_mean_acceptance_length": 2.0}, None, "keep target-only"),
    ],
)
async def test_each_threshold_can_tip_it(limits, memory_ratio, expected):
    """A figure that is judged but could not be measured does not hold."""
    level = await measured([wave(10, 1.0)], [wave(10, 2.0)])

    verdict, _, _ = await judged(level, memory_ratio, **limits)

    assert verdict == expected


async def test_failed_requests_keep_target_only():
    on = Wave((sample(), sample(1, error="PeerUnavailable: gone")), 1.0)
    level = await measured([on], [wave(6, 2.0)])

    verdict, checks, _ = await judged(level)

    assert checks["max_failed_share"].value == 0.5
    assert verdict == "keep target-only"


async def test_halves_that_differ_decide_nothing():
    """Figures that do not agree with themselves enable nothing, however good they look."""
    on = [wave(10, seconds) for seconds in (1.0, 1.0, 1.0, 0.5, 0.5, 0.5)]
    level = await measured(on, [wave(10, 4.0)])

    verdict, _, decision = await judged(level)

    assert verdict == "not comparable"
    assert "apart" in decision.levels[0].reasons[0]


async def test_a_busy_machine_decides_nothing():
    level = await measured([wave(10, 1.0)], [wave(10, 2.0)])
    busy = type(level)(
        **{name: getattr(level, name) for name in level.__slots__} | {"others_cpu_share": 0.4}
    )

    decision = decide([busy], Thresholds(max_others_cpu_share=0.25), None)

    assert decision.verdict == "not comparable"
    assert "other programs took 40 %" in decision.levels[0].reasons[0]


async def test_every_level_must_enable():
    good = await measured([wave(10, 1.0)], [wave(10, 2.0)])
    bad = await measured([wave(10, 2.0)], [wave(10, 1.0)])

    assert decide([good, good], Thresholds(**QUIET), None).verdict == "enable"
    assert decide([good, bad], Thresholds(**QUIET), None).verdict == "keep target-only"
    assert decide([], Thresholds(**QUIET), None).verdict == "not comparable"


def test_thresholds_come_from_a_file_and_from_words(tmp_path):
    path = tmp_path / "limits.json"
    path.write_text(json.dumps({"min_speedup": 1.5, "max_ttft_p95_ratio": 2}))

    found = read_thresholds(path, ["min_speedup=1.2", "max_e2e_p95_ratio=none"])

    assert found.min_speedup == 1.2
    assert found.max_ttft_p95_ratio == 2
    assert found.max_e2e_p95_ratio is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["min_speedupp=1"], "unknown key 'min_speedupp'; did you mean 'min_speedup'?"),
        (["min_speedup=fast"], "min_speedup: found 'fast', wanted a valid number"),
        (["min_speedup=0"], "min_speedup: found '0', wanted greater than 0"),
        (["min_speedup"], "--threshold: found 'min_speedup', wanted NAME=VALUE"),
    ],
)
def test_a_wrong_threshold_is_named(words, message):
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")):
        read_thresholds(None, words)


@pytest.mark.parametrize(("text", "message"), [("[1]", "an object was wanted"), ("{", "not JSON")])
def test_a_wrong_thresholds_file_is_named(tmp_path, text, message):
    path = tmp_path / "limits.json"
    path.write_text(text)

    with pytest.raises(ConfigurationError, match=message):
        read_thresholds(path, [])
    with pytest.raises(ConfigurationError, match="--thresholds: .*missing.json"):
        read_thresholds(tmp_path / "missing.json", [])
