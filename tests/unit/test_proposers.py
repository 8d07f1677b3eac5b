"""Prompt lookup, and the engine without a model."""

import numpy as np

from specserve.errors import CacheMismatch
from specserve.model.messages import CallFailed, ProposeReply
from specserve.model.ngram_engine import NgramEngine
from specserve.model.proposers import NgramProposer, ngram_propose, one_hot
from specserve.speculation.types import AcceptanceRule, SamplingParams
from support.engines import Caller, Clock, run

STANDARD = SamplingParams(AcceptanceRule.STANDARD, seed=1, choice=0)


def ngram_engine(**kwargs: int) -> NgramEngine:
    return NgramEngine(NgramProposer(1, 3), clock=Clock(), **kwargs)


def test_the_longest_match_wins_over_a_more_recent_shorter_one():
    assert ngram_propose([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], 2, 1, 3) == [9, 5]


def test_among_equal_lengths_the_most_recent_wins():
    assert ngram_propose([1, 2, 7, 1, 2, 8, 1, 2], 1, 1, 2) == [8]


def test_a_loop_goes_on_looping():
    assert ngram_propose([5, 1, 2, 1, 2], 5, 1, 4) == [1, 2, 1, 2, 1]
    assert ngram_propose([3, 3], 3, 1, 4) == [3, 3, 3]


def test_nothing_is_guessed_without_a_match():
    assert ngram_propose([1, 2, 3], 4, 1, 3) == []
    assert ngram_propose([1, 2, 1], 4, 2, 3) == []
    assert ngram_propose([1], 4, 1, 3) == []
    assert ngram_propose([1, 1], 0, 1, 3) == []


def test_q_of_a_guess_is_one_hot():
    q = one_hot([4, 2])
    assert q.token_ids.tolist() == [[4], [2]]
    assert q.weights.tolist() == [[1.0], [1.0]]


def test_B119_an_empty_guess_is_an_empty_proposal():
    caller = Caller("a", [1, 2, 3], STANDARD)
    (reply,) = run(ngram_engine(), caller.propose(4))
    assert isinstance(reply, ProposeReply)
    assert (reply.draft_token_ids, reply.draft_probs, reply.cached_length) == ((), None, 3)


def test_sessions_follow_the_same_rules_as_with_a_model():
    """Guess, roll back by length, append; the last guessed token is not held."""
    engine = ngram_engine()
    caller = Caller("a", [1, 2, 3, 1, 2], STANDARD)
    (reply,) = run(engine, caller.propose(3))
    assert isinstance(reply, ProposeReply)
    assert (reply.draft_token_ids, reply.cached_length) == ((3, 1, 2), 7)
    assert reply.draft_probs is not None
    assert np.array_equal(reply.draft_probs.weights, np.ones((3, 1)))
    caller.heard(reply)
    caller.committed.append([3, 7, 1])
    (reply,) = run(engine, caller.propose(2))
    assert isinstance(reply, ProposeReply)
    assert reply.draft_token_ids == (2, 3)
    caller.cached_length, caller.committed = 5, type(caller.committed)([9] * 6)
    (failed,) = run(engine, caller.propose(2))
    assert isinstance(failed, CallFailed)
    assert isinstance(failed.error, CacheMismatch)
    assert engine.load.num_sessions == 1


def test_B083_guesses_end_with_the_context():
    engine = ngram_engine(max_model_len=7)
    (reply,) = run(engine, Caller("a", [1, 1, 1, 1, 1]).propose(5))
    assert isinstance(reply, ProposeReply)
    assert len(reply.draft_token_ids) == 2
