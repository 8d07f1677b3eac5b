"""How long calls at hand wait for calls that are about to come."""

import random

import pytest

from specserve.model.forward_times import ForwardTimes
from specserve.model.hold_rule import Due, Room, best_hold_s

PLENTY = Room(num_calls=1000, num_tokens=100_000)


def due(count, wait_s, *, gap_s=0.015, num_tokens=5):
    return [Due([wait_s], gap_s, num_tokens)] * count


def flat(_: float) -> float:
    return 0.020


def linear(num_tokens: float) -> float:
    return 0.004 * num_tokens


def test_a_prompt_that_takes_long_is_not_held_for_calls_that_do_not():
    """Three calls of 15 tokens together, due in 0.6 s, would only wait 0.1 s behind a prompt of
    1.8 s what they wait for it now."""

    def forward_s(num_tokens: float) -> float:
        return 0.1 if num_tokens <= 20 else 1.8

    three = due(3, 0.6, gap_s=0.6)
    assert best_hold_s(1, 100, three, PLENTY, forward_s) == 0.0
    assert best_hold_s(1, 20, due(3, 0.02), PLENTY, lambda _: 0.1) == 0.02


def test_nobody_waits_for_calls_that_find_no_seat_or_no_tokens():
    assert best_hold_s(3, 15, due(5, 0.010), Room(1, 1000), flat) == 0.0
    assert best_hold_s(1, 5, due(5, 0.010), Room(1000, 4), flat) == 0.0
    assert best_hold_s(1, 5, due(3, 0.010), PLENTY, flat) == 0.010


@pytest.mark.parametrize("wait_s", [0.001, 0.010, 0.019])
@pytest.mark.parametrize("num_due", [1, 4, 20])
@pytest.mark.parametrize("num_calls", [1, 4, 20])
def test_where_a_forward_takes_as_long_as_its_tokens_are_many_nobody_is_held(
    num_calls, num_due, wait_s
):
    """Also by times that were learned: averages by powers of two, with lines between them."""
    times, source = ForwardTimes(), random.Random(1)
    for _ in range(2000):
        num_tokens = source.randrange(1, 300)
        times.note(num_tokens, linear(num_tokens))
    calls = due(num_due, wait_s, gap_s=0.020)
    assert best_hold_s(num_calls, 5 * num_calls, calls, PLENTY, linear) == 0.0
    assert best_hold_s(num_calls, 5 * num_calls, calls, PLENTY, times.expected) == 0.0


def test_learned_times_lie_on_the_line_between_measured_sizes():
    times = ForwardTimes()
    assert times.expected(5) == 0.0
    times.note(4, 0.010)
    times.note(64, 0.040)
    assert times.expected(1) == 0.010
    assert times.expected(34) == pytest.approx(0.025)
    assert times.expected(4) == 0.010
    assert times.expected(1000) == 0.040, "at first believed to cost no more"
