"""Drafting ahead is kept where it is measured to pay, and only there."""

from __future__ import annotations

import random

import pytest

from specserve.model.overlap_trial import OverlapTrial, OverlapTrials
from specserve.speculation.types import AcceptanceRule

GREEDY = AcceptanceRule.GREEDY
K = 4


def share_on(trial: OverlapTrial, gain: float, num_rounds: int, noise: float = 0.1) -> float:
    """Run rounds of 30 ms that drafting ahead makes `gain` times as fast; the share that did it."""
    source, num_on = random.Random(3), 0
    for _ in range(num_rounds):
        num_on += trial.is_on
        seconds = 0.03 * source.gauss(1.0, noise) / (gain if trial.is_on else 1.0)
        trial.note(seconds, K, 1 + source.randrange(K + 1))
    return num_on / num_rounds


@pytest.mark.parametrize("num_sessions", [1, 8])
def test_where_it_loses_it_is_only_tried(num_sessions):
    """Three per cent slower: in a long run one round in ten is lost to looking."""
    trial = OverlapTrials().of(num_sessions, GREEDY)
    share_on(trial, 0.97, 1000)
    assert not trial.is_on
    assert share_on(trial, 0.97, 8000) < 0.1


@pytest.mark.parametrize("num_sessions", [1, 8])
def test_where_it_pays_it_is_chosen(num_sessions):
    trial = OverlapTrials().of(num_sessions, GREEDY)
    share_on(trial, 1.1, 1000)
    assert share_on(trial, 1.1, 8000) > 0.9


@pytest.mark.parametrize("num_sessions", [1, 8])
def test_where_it_makes_no_difference_it_is_left_off(num_sessions):
    """The draft's time may be somebody else's."""
    trial = OverlapTrials().of(num_sessions, GREEDY)
    share_on(trial, 1.0, 2000)
    assert share_on(trial, 1.0, 8000) < 0.25


def test_among_others_the_gain_is_to_be_seen_first():
    trials = OverlapTrials()
    assert [trials.of(count, GREEDY).is_on for count in (1, 2, 8)] == [True, False, False]


def test_each_rule_has_a_trial_of_its_own():
    trials = OverlapTrials()
    share_on(trials.of(8, GREEDY), 1.2, 3000)
    assert trials.of(8, GREEDY).is_on
    assert not trials.of(8, AcceptanceRule.STANDARD).is_on


def test_a_load_that_changes_is_followed():
    """It pays, then it does not, then it pays again."""
    trial = OverlapTrials().of(1, GREEDY)
    for gain in (1.2, 0.8, 1.2):
        share_on(trial, gain, 6000)
        assert trial.is_on == (gain > 1)


def test_pauses_are_no_rounds():
    trial = OverlapTrials().of(1, GREEDY)
    for _ in range(1000):
        trial.note(5.0, K, 2)
    assert trial.turn == 0
