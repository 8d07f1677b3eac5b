"""What `specserve bench` ends with says what it found."""

import pytest

from specserve.tools.bench.command import exit_code
from specserve.tools.bench.record import AutoResult, MethodResult, Record, Setting
from specserve.tools.bench.report import html_of, text_of
from specserve.tools.bench.sample import Wave
from specserve.tools.bench.statistics import Interval
from specserve.tools.bench.summary import summarise
from specserve.tools.bench.thresholds import Thresholds
from support.bench_samples import sample

ENABLE, PROBLEM, KEEP_TARGET_ONLY, NOT_COMPARABLE = 0, 1, 3, 4


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(Setting(4, 2), ENABLE), (Setting(4, 0), KEEP_TARGET_ONLY), (None, NOT_COMPARABLE)],
)
def test_a_sweep_ends_with_its_setting(chosen, expected):
    section = Record("").section("sweep")
    section.chosen = chosen

    assert exit_code(section, Thresholds()) == expected


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([0.98, 1.01], ENABLE), ([1.01, 0.96], KEEP_TARGET_ONLY), ([1.0, None], NOT_COMPARABLE)],
)
def test_auto_is_held_to_its_threshold_at_every_level(ratios, expected):
    section = Record("").section("auto")
    for value in ratios:
        found = None if value is None else Interval(value, value - 0.01, value + 0.01, 20)
        section.auto.append(AutoResult("concurrency 1", "always-on", found))

    assert exit_code(section, Thresholds()) == expected


@pytest.mark.parametrize(
    ("num_failed", "most", "expected"),
    [(0, 0.0, ENABLE), (1, 0.0, PROBLEM), (1, 0.5, ENABLE), (2, None, PROBLEM)],
)
def test_a_length_of_the_survivors_is_told_as_such(num_failed, most, expected):
    """Requests that failed are in no mean: they are counted, and named, beside it."""
    record = Record("")
    section = record.section("acceptance")
    errors = ["KvFull: no blocks"] * num_failed + [""] * (2 - num_failed)
    wave = Wave(tuple(sample(number, error=error) for number, error in enumerate(errors)), 1.0)
    section.methods.append(MethodResult("suffix", "{}", summarise([wave])))

    assert exit_code(section, Thresholds(max_failed_share=most)) == expected
    for shown in (text_of(record), html_of(record)):
        assert f"{num_failed} of 2" in shown
        assert ("no blocks" in shown) == (num_failed > 0)
