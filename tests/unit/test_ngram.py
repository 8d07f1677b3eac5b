"""Prompt lookup: which earlier place is continued, and what comes of it."""

import numpy as np
import pytest

from specserve.speculation.guess import NO_GUESS, Guess, one_hot
from specserve.speculation.ngram import NgramGuesser
from specserve.speculation.types import AcceptanceRule


def guess(token_ids, num_speculative_tokens, min_n, max_n):
    guesser = NgramGuesser(min_n, max_n)
    guesser.append(token_ids)
    return list(guesser.guess(num_speculative_tokens).token_ids)


def test_the_longest_match_wins_over_a_more_recent_shorter_one():
    assert guess([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], 2, 1, 3) == [9, 5]


def test_among_equal_lengths_the_most_recent_wins():
    assert guess([1, 2, 7, 1, 2, 8, 1, 2], 1, 1, 2) == [8]


def test_a_loop_goes_on_looping():
    assert guess([5, 1, 2, 1, 2], 5, 1, 4) == [1, 2, 1, 2, 1]
    assert guess([3, 3], 3, 1, 4) == [3, 3, 3]


def test_nothing_is_guessed_without_a_match():
    assert guess([1, 2, 3], 4, 1, 3) == []
    assert guess([1, 2, 1], 4, 2, 3) == []
    assert guess([1], 4, 1, 3) == []
    assert guess([1, 1], 0, 1, 3) == []
    assert NgramGuesser(1, 4).guess(4) == NO_GUESS


def test_the_match_length_is_told():
    guesser = NgramGuesser(1, 3)
    guesser.append([1, 2, 3, 9, 1, 2, 3])
    assert guesser.guess(1) == Guess((9,), (1.0,), 3)


def test_a_text_that_comes_in_pieces_is_one_text():
    """However it was cut, and past every growth of the buffer: as if it came at once."""
    random = np.random.default_rng(3)
    text = random.integers(0, 7, 5000).tolist()
    guesser, taken = NgramGuesser(1, 5), 0
    while taken < len(text):
        size = int(random.integers(0, 1500))
        guesser.append(text[taken : taken + size])
        taken = min(taken + size, len(text))
        assert list(guesser.guess(6).token_ids) == guess(text[:taken], 6, 1, 5)


def test_q_of_a_guess_is_one_hot():
    q = one_hot([4, 2])
    assert q.token_ids.tolist() == [[4], [2]]
    assert q.weights.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_only_the_standard_rule_is_given_a_q(rule):
    proposal = Guess((4, 2), (1.0, 0.5), 3).proposal(rule)
    assert proposal.draft_token_ids == (4, 2)
    assert (proposal.draft_probs is not None) == (rule is AcceptanceRule.STANDARD)
    assert NO_GUESS.proposal(rule).draft_probs is None
