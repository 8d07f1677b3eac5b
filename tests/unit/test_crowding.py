"""What is learned of rounds that take longer than they should, and how long it is believed."""

from __future__ import annotations

import pytest

from specserve.speculation.crowding import CROWD_FORGET_MOST_S, CROWD_FORGET_S, Crowding


def tried(crowding: Crowding, now: float, num_rounds: int = 32, ratio: float = 1.6) -> float:
    """Run some rounds of four sessions; return when the last ended."""
    for index in range(num_rounds):
        crowding.add(ratio * 0.02, 3, 4, lambda _: 0.02, now + 0.01 * index)
    return now + 0.01 * (num_rounds - 1)


def waited(crowding: Crowding, since: float) -> float:
    """Return for how long the rounds are believed to be slow."""
    seconds = 1.0
    while crowding.value(since + seconds) is not None:
        seconds += 1.0
    return seconds


def test_each_try_that_comes_to_nothing_waits_twice_as_long_for_the_next() -> None:
    """Else a load that lasts would be slowed by the same mistake for ever, every 20 s."""
    crowding, now, waits = Crowding(), 0.0, []
    for _ in range(8):
        last = tried(crowding, now)
        assert (crowding.value(last) or 0.0) > 1.2
        waits.append(waited(crowding, last))
        now = last + waits[-1]

    assert waits == pytest.approx(
        [min(CROWD_FORGET_S * 2**n, CROWD_FORGET_MOST_S) for n in range(8)], abs=1.0
    )


def test_idleness_is_no_try_that_came_to_nothing() -> None:
    """An hour without requests says nothing of crowds, nor does a try that shows none."""
    crowding = Crowding()
    last = tried(crowding, 0.0)
    for _ in range(4):
        last = tried(crowding, last + 3600, num_rounds=4, ratio=1.0)

    assert waited(crowding, last) == pytest.approx(CROWD_FORGET_S, abs=1.0)


def test_what_was_forgotten_has_no_part_in_what_is_learned_anew() -> None:
    """Else the first round of a try would bring the old opinion back."""
    crowding = Crowding()
    last = tried(crowding, 0.0)
    last = tried(crowding, last + CROWD_FORGET_S + 1, num_rounds=2, ratio=1.0)

    assert crowding.value(last) == pytest.approx(1.0, abs=0.01)


def test_what_was_crowded_before_is_seen_again_within_a_few_rounds() -> None:
    """A try costs whoever takes part in it: it is to end soon."""
    crowding = Crowding()
    first = tried(crowding, 0.0, num_rounds=8)
    once = crowding.value(first) or 0.0
    last = tried(crowding, first + CROWD_FORGET_S + 1, num_rounds=8)

    assert once < 1.15
    assert (crowding.value(last) or 0.0) > 1.25


def test_rounds_that_go_on_are_no_try() -> None:
    """A K that stood again is forgotten as soon as at first."""
    crowding = Crowding()
    last = tried(crowding, 0.0)
    last = tried(crowding, last + CROWD_FORGET_S + 1, num_rounds=400)

    assert waited(crowding, last) == pytest.approx(CROWD_FORGET_S, abs=1.0)


def test_nothing_known_is_no_crowd() -> None:
    assert Crowding().value(5.0) is None


def test_rounds_are_held_against_what_came_on_average() -> None:
    """Few guesses come to this round and many to the next: both take as long as all together."""
    crowding = Crowding()
    for index in range(64):
        crowding.add(0.030, 1 + 4 * (index % 2), 4, lambda came: 0.010 * came, 0.01 * index)

    assert crowding.value(1.0) == pytest.approx(1.0, abs=0.1)
