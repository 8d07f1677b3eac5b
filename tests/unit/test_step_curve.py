"""The time of a forward by its rows: measured, joined, extended, forgotten."""

import pytest

from specserve.speculation.step_curve import FORGET_S, WINDOW, RecentMean, StepCurve


def curve_of(points, times=4, now=0.0):
    """A curve that saw each (rows, seconds) so often, a little apart each time."""
    curve = StepCurve()
    for rows, seconds in points:
        for number in range(times):
            curve.add(rows, seconds * (1 + 1e-6 * number), now)
    curve.refresh(now)
    return curve


def test_one_pause_in_a_window_moves_nothing():
    """A collector's pause of a hundred times the usual is not in the mean."""
    mean = RecentMean()
    for _ in range(WINDOW - 1):
        mean.add(1.0, 0.0)
    mean.add(100.0, 0.0)

    assert mean.value() == 1.0


def test_first_measurement_that_was_a_pause_is_outvoted_by_the_second():
    """Of two the lower counts: nothing is ever wrongly fast."""
    mean = RecentMean()
    mean.add(50.0, 0.0)
    assert mean.value() == 50.0
    mean.add(1.0, 0.0)

    assert mean.value() == 1.0


def test_a_lasting_change_is_followed_within_a_window():
    mean = RecentMean()
    for value in [1.0] * WINDOW + [3.0] * WINDOW:
        mean.add(value, 0.0)

    assert mean.value() == 3.0


def test_measured_sizes_are_given_back_and_joined_by_lines():
    curve = curve_of([(1, 0.010), (5, 0.014), (20, 0.020)])

    assert curve.seconds(5) == pytest.approx(0.014, rel=1e-3)
    assert curve.seconds(3) == pytest.approx(0.012, rel=1e-3)
    assert curve.seconds(12.5) == pytest.approx(0.017, rel=1e-3)


def test_beyond_the_ends_the_slope_goes_on_but_stays_between_flat_and_proportional():
    """A line through noise would go anywhere; a forward never costs more than its rows' share."""
    linear = curve_of([(10, 0.11), (20, 0.21), (40, 0.41)])
    falling = curve_of([(10, 0.2), (20, 0.1)])
    steep = curve_of([(10, 0.01), (11, 0.5)])

    assert linear.seconds(160) == pytest.approx(1.61, rel=0.1)
    assert linear.seconds(160) <= 1.61
    assert falling.seconds(40) == pytest.approx(0.1, rel=1e-3)
    assert steep.seconds(22) <= 2 * steep.seconds(11)


def test_slope_hidden_by_noise_is_taken_as_flat():
    """More rows then look cheap, are tried and measured; the other way round they never would."""
    curve = curve_of([(32, 0.0200), (33, 0.0201)])

    assert curve.seconds(160) < 0.021


def test_calls_of_one_forward_count_once():
    """32 sessions report the same forward: a pause in it must not fill the window."""
    curve = StepCurve()
    for _ in range(3):
        curve.add(32, 0.02, 0.0)
    for _ in range(32):
        curve.add(32, 2.0, 0.0)
    curve.add(32, 0.02 + 1e-6, 0.0)
    curve.refresh(0.0)

    assert curve.seconds(32) == pytest.approx(0.02, rel=1e-3)


def test_size_measured_once_has_the_others_speak_as_well():
    """One bad forward at a size that is then avoided must not be believed for ever."""
    curve = curve_of([(1, 0.010), (5, 0.010)])
    curve.add(160, 1.0, 0.0)
    curve.refresh(0.0)

    assert curve.seconds(160) == pytest.approx((1.0 + 2 * 0.010) / 3, rel=0.01)


def test_size_not_met_for_long_is_forgotten_and_the_newest_is_kept():
    curve = curve_of([(160, 1.0)], now=0.0)
    curve.add(1, 0.01, 10.0)
    later = 11.0 + FORGET_S
    curve.refresh(later)

    assert curve.seconds(160) < 0.05
    assert curve.seconds(1) == pytest.approx(0.01)
    assert StepCurve().seconds(4) == 0.0
