"""Suffix decoding: which ending is continued, how far, and with what estimate."""

import random

import pytest

from specserve.speculation.guess import NO_GUESS, Guess
from specserve.speculation.past_outputs import PIECE, PastOutputs
from specserve.speculation.suffix import SuffixGuesser, SuffixParams
from specserve.speculation.suffix_automaton import SuffixAutomaton

PARAMS = SuffixParams(max_tree_depth=24, max_spec_factor=1.0, min_token_prob=0.1)


def guesser_of(text, params=PARAMS, past=tuple):
    guesser = SuffixGuesser(params, past)
    guesser.append(text)
    return guesser


def outputs_of(*texts, depth=24):
    automaton = SuffixAutomaton(depth)
    for text in texts:
        for token_id in text:
            automaton.append(token_id)
        automaton.end_text()
    return automaton


def test_a_long_match_justifies_a_long_guess():
    """m matching tokens: m guessed ones, fewer when fewer are asked for."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert guesser_of(text).guess(8) == Guess((4, 5, 6), (1.0,) * 3, 3)
    assert guesser_of(text).guess(2) == Guess((4, 5), (1.0,) * 2, 3)
    half = SuffixParams(24, 0.5, 0.1)
    assert guesser_of(text, half).guess(8) == Guess((4,), (1.0,), 3)
    double = SuffixParams(24, 2.0, 0.1)
    assert guesser_of(text, double).guess(8).token_ids == (4, 5, 6, 7, 8, 9)


def test_what_followed_more_often_is_guessed_and_its_share_is_the_estimate():
    """After 1: twice 2, once 3; of equals the more recent."""
    assert guesser_of([1, 2, 9, 1, 3, 8, 1, 2, 7, 1]).guess(1) == Guess((2,), (2 / 3,), 1)
    assert guesser_of([1, 2, 9, 1, 3, 8, 1]).guess(1) == Guess((3,), (1 / 2,), 1)


def test_the_estimate_is_the_product_along_the_guess():
    """5 6 then 7 (twice) or 8 (once): the second token needs the first."""
    text = [4, 5, 6, 7, 0, 4, 5, 6, 7, 1, 4, 5, 9, 2, 4, 5]
    guess = guesser_of(text).guess(2)
    assert guess.token_ids == (6, 7)
    assert guess.probs == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert guess.match_length == 2
    assert guess.score == pytest.approx(4 / 3)


def test_a_guess_ends_before_an_unlikely_token():
    text = [1, 2, 9, 1, 3, 8, 1]
    assert guesser_of(text, SuffixParams(24, 1.0, 0.5)).guess(4) == Guess((3,), (0.5,), 1)
    assert guesser_of(text, SuffixParams(24, 1.0, 0.51)).guess(4) == NO_GUESS


def test_match_and_guess_share_the_depth():
    """A long repeat at depth 8: no more than 8 tokens of match and guess together."""
    text = list(range(40)) * 2 + list(range(20))
    guess = guesser_of(text, SuffixParams(8, 1.0, 0.1)).guess(16)
    assert guess.token_ids == (20, 21, 22, 23)
    guess = guesser_of(text, SuffixParams(8, 4.0, 0.1)).guess(16)
    assert guess.token_ids == (20, 21, 22, 23, 24, 25)


def test_a_loop_goes_on_looping():
    assert guesser_of([5, *[1, 2] * 4]).guess(4).token_ids == (1, 2, 1, 2)
    assert guesser_of([3] * 9).guess(4).token_ids == (3, 3, 3, 3)


def test_nothing_is_guessed_without_a_match():
    assert guesser_of([1, 2, 3]).guess(4) == NO_GUESS
    assert guesser_of([]).guess(4) == NO_GUESS
    assert guesser_of([1, 1]).guess(0) == NO_GUESS


def reference(text, num_speculative_tokens, params):
    """Every match length by itself, by search in the text alone."""
    best, best_score = NO_GUESS, 0.0
    for match in range(1, min(params.max_tree_depth, len(text)) + 1):
        limit = min(
            num_speculative_tokens,
            params.max_tree_depth - match,
            int(match * params.max_spec_factor + 1e-6),
        )
        string, probs, prob = text[-match:], [], 1.0
        while len(probs) < limit:
            size = len(string)
            followers = {}
            for end in range(size, len(text)):
                if text[end - size : end] == string:
                    times, _ = followers.get(text[end], (0, 0))
                    followers[text[end]] = (times + 1, end)
            if not followers:
                break
            token_id, (times, _) = max(followers.items(), key=lambda item: item[1])
            prob *= times / sum(count for count, _ in followers.values())
            if prob < params.min_token_prob:
                break
            string = [*string, token_id]
            probs.append(prob)
        if probs and sum(probs) >= best_score:
            best, best_score = Guess(tuple(string[match:]), tuple(probs), match), sum(probs)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_guesses_score_as_those_of_a_search_through_the_text(seed):
    """60 random texts a seed: no guess is worth more than ours, and ours is worth what it says."""
    chance = random.Random(seed)
    for _ in range(60):
        params = SuffixParams(
            chance.randrange(2, 10), chance.choice([0.5, 1.0, 2.0]), chance.choice([0.0, 0.1, 0.4])
        )
        size = chance.choice([2, 3, 5])
        text = [chance.randrange(size) for _ in range(chance.randrange(0, 40))]
        ours = guesser_of(text, params).guess(5)
        theirs = reference(text, 5, params)
        assert ours.score == pytest.approx(theirs.score)
        assert len(ours.token_ids) == len(ours.probs) <= 5
        if ours.token_ids:
            assert ours.match_length >= theirs.match_length


def test_past_outputs_are_looked_into_and_the_better_guess_wins():
    """The text has met 1 2 only; the past knows how 7 1 2 goes on."""
    past = outputs_of([7, 1, 2, 3, 4, 5], [7, 1, 2, 3, 4, 6])
    text = [1, 2, 9, 7, 1, 2]
    assert guesser_of(text).guess(4).token_ids == (9, 7)
    guess = guesser_of(text, past=lambda: [past]).guess(4)
    assert guess == Guess((3, 4, 6), (1.0, 1.0, 0.5), 3)


def test_of_equal_scores_the_texts_own_guess_is_taken():
    past = outputs_of([1, 2, 8])
    assert guesser_of([1, 2, 9, 1, 2], past=lambda: [past]).guess(1).token_ids == (9,)


def test_an_output_that_ended_there_lowers_the_estimate():
    past = outputs_of([1, 2, 3], [1, 2])
    assert guesser_of([1, 2], past=lambda: [past]).guess(1) == Guess((3,), (0.5,), 2)


class TestPastOutputs:
    def test_outputs_go_to_their_own_tenant_only(self):
        """What one tenant said is no guess for another, nor for the common one."""
        past = PastOutputs(10, 1000, 24)
        list(past.add(b"one", (1, 0), [1, 2, 3, 4]))
        for salt, expected in ((b"one", (3, 4)), (b"two", ()), (b"", ())):
            guesser = SuffixGuesser(PARAMS, lambda salt=salt: past.of(salt, None))
            guesser.append([1, 2])
            assert guesser.guess(4).token_ids == expected

    def test_an_output_of_the_same_draws_is_left_out(self):
        """Its uniforms would decide about their own work; the rest of its tenant's too, then."""
        past = PastOutputs(4, 1000, 24)
        list(past.add(b"", (1, 0), [1, 2, 3]))
        list(past.add(b"", (2, 0), [4, 5, 6]))
        assert len(past.of(b"", None)) == 1
        assert past.of(b"", (1, 0)) == []
        assert len(past.of(b"", (1, 1))) == 1
        list(past.add(b"", (1, 0), [1, 2, 3]))
        assert [outputs.num_tokens for outputs in past.of(b"", (2, 0))] == [3]

    def test_a_long_output_is_taken_in_by_pieces(self):
        """Others get their turn; one that is broken off ends there, and is no text's beginning."""
        past = PastOutputs(4, 10_000, 24)
        pieces = past.add(b"", (1, 0), [number % 7 for number in range(3 * PIECE)])
        next(pieces)
        assert past.num_tokens == PIECE
        assert past.of(b"", (1, 0)) == [], "its draws are known from its first token on"
        pieces.close()
        assert len(list(past.add(b"", (2, 0), [8, 9]))) == 0
        guesser = SuffixGuesser(PARAMS, lambda: past.of(b"", None))
        guesser.append([(PIECE - 1) % 7, 8])
        assert guesser.guess(1).token_ids == (9,)

    @pytest.mark.parametrize(("max_outputs", "max_tokens"), [(1, 1), (1, 50), (7, 90), (40, 64)])
    def test_the_bounds_hold_whatever_comes(self, max_outputs, max_tokens):
        """1,000 outputs of 5 tenants, some longer than all that may be kept."""
        chance = random.Random(max_outputs)
        past = PastOutputs(max_outputs, max_tokens, 8)
        for number in range(1000):
            salt = bytes([chance.randrange(5)])
            list(past.add(salt, (number, 0), [chance.randrange(9)] * chance.randrange(1, 120)))
            assert past.num_outputs <= max_outputs
            assert past.num_tokens <= max_tokens
            assert past.of(salt, None), "the newest output is kept"
            if chance.random() < 0.5:
                past.of(bytes([chance.randrange(5)]), None)

    def test_the_tenant_that_was_idle_longest_goes_first(self):
        past = PastOutputs(3, 1000, 24)
        for salt in (b"a", b"b", b"c"):
            list(past.add(salt, (1, 0), [1, 2, 3]))
        past.of(b"a", None)
        list(past.add(b"d", (1, 0), [1, 2, 3]))
        assert [bool(past.of(salt, None)) for salt in (b"a", b"b", b"c", b"d")] == [
            True,
            False,
            True,
            True,
        ]

    def test_half_of_the_bound_at_least_is_kept_of_one_tenant(self):
        """The newest outputs, whole: 8 of at most 16 are always there."""
        past = PastOutputs(16, 10_000, 24)
        for number in range(100):
            list(past.add(b"", (number, 0), [1000 + number, 2000 + number]))
            for known in range(max(0, number - 7), number + 1):
                guesser = SuffixGuesser(PARAMS, lambda: past.of(b"", None))
                guesser.append([1000 + known])
                assert guesser.guess(1).token_ids == (2000 + known,)

    def test_zero_keeps_none(self):
        past = PastOutputs(0, 1000, 24)
        list(past.add(b"", (1, 0), [1, 2, 3]))
        assert past.of(b"", None) == []
