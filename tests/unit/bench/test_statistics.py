"""Quantiles, Student's t, and ratios of paired runs."""

import math

import numpy as np
import pytest

from specserve.tools.bench.statistics import (
    Work,
    quantiles,
    rate,
    ratio_of_rates,
    relative_difference,
    student_quantile,
)


def test_quantiles_of_known_values():
    """Quantiles interpolate between neighbours; without values there are none."""
    found = quantiles([float(value) for value in range(1, 102)])

    assert found is not None
    assert (found.count, found.mean, found.p50, found.largest) == (101, 51.0, 51.0, 101.0)
    assert (found.p95, found.p99) == (96.0, 100.0)
    assert quantiles([]) is None


@pytest.mark.parametrize(
    ("dof", "expected"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (11, 2.20099), (30, 2.04227)],
)
def test_students_t_is_that_of_the_tables(dof, expected):
    assert student_quantile(0.975, dof) == pytest.approx(expected, abs=1e-5)


def test_students_t_tends_to_the_normal_law():
    assert student_quantile(0.975, 5000) == pytest.approx(1.96, abs=1e-3)


def test_ratio_is_that_of_the_totals():
    """A long pair weighs as much as it lasts: the ratio is of all tokens over all time."""
    left = [Work(10, 1.0), Work(90, 1.0)]
    right = [Work(10, 2.0), Work(90, 1.5)]

    found = ratio_of_rates(left, right)

    assert found is not None
    assert found.value == pytest.approx((100 / 2.0) / (100 / 3.5))
    assert rate(left) == 50.0


def test_equal_ratios_leave_no_doubt():
    """When all pairs have the same ratio the interval is that value, however uneven they are."""
    left = [Work(n, n * 0.5) for n in (3, 7, 20, 41)]
    right = [Work(n, n * 1.0) for n in (3, 7, 20, 41)]

    found = ratio_of_rates(left, right)

    assert found is not None
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)


def test_one_pair_tells_no_interval():
    found = ratio_of_rates([Work(10, 1.0)], [Work(10, 2.0)])

    assert found is not None
    assert (found.value, found.low, found.high, found.count) == (2.0, None, None, 1)


@pytest.mark.parametrize("side", [[], [Work(0, 1.0)], [Work(1, 0.0)]])
def test_a_side_without_work_has_no_ratio(side):
    other = [Work(1, 1.0)] * len(side)

    assert ratio_of_rates(side, other) is None
    assert ratio_of_rates(other, side) is None


def test_sides_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="2 runs on the left, 1 on the right"):
        ratio_of_rates([Work(1, 1.0)] * 2, [Work(1, 1.0)])


@pytest.mark.slow
def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Of 2,000 seeded runs of 12 noisy pairs the 95 % interval holds the true ratio in about 95 %.

    The bounds are four standard errors of a 95 % share of 2,000 away: a false alarm is below 1e-4,
    and the test is seeded.
    """
    random = np.random.default_rng(5)
    truth, held, runs = 1.3, 0, 2000
    for _ in range(runs):
        size = random.uniform(0.5, 2.0, 12)  # prompts differ in length
        left = size * np.exp(random.normal(0, 0.1, 12))
        right = truth * size * np.exp(random.normal(0, 0.1, 12))
        found = ratio_of_rates(
            [Work(96, float(s)) for s in left], [Work(96, float(s)) for s in right]
        )
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    error = math.sqrt(0.95 * 0.05 / runs)

    assert abs(held / runs - 0.95) < 4 * error + 0.005  # the linearisation's own bias


def test_relative_difference_is_in_shares_of_the_smaller():
    assert relative_difference(1.0, 1.1) == pytest.approx(0.1)
    assert relative_difference(1.1, 1.0) == pytest.approx(0.1)
    assert relative_difference(0.0, 1.0) == math.inf


def test_an_interval_over_a_factor_keeps_its_shape():
    found = ratio_of_rates([Work(10, 1.0)] * 3, [Work(10, 2.0), Work(10, 2.2), Work(10, 1.9)])

    assert found is not None
    halved = found.divided_by(2.0)
    assert halved.value == found.value / 2
    assert halved.low == found.low / 2
    assert halved.high == found.high / 2
