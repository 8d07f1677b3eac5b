"""A draft that stops when it is unsure: the same tokens as without, fewer of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from specserve.model.draft_confidence import GuessConfidence, row_confidences
from specserve.model.messages import ProposeReply
from specserve.model.toy import ToySpec, toy_logits
from specserve.speculation.types import AcceptanceRule, SamplingParams
from support.engines import GREEDY, Caller, check_pool, run, toy_engine

MODEL = "toy:vocab_size=8,order=3,eos_bias=-1000,sharpness=2.0"
THRESHOLD = 0.2
K = 5


def sampling_of(rule: AcceptanceRule) -> SamplingParams:
    return GREEDY if rule is AcceptanceRule.GREEDY else SamplingParams(rule, 7, 0)


def probability_of_top(tokens: list[int]) -> float:
    """From the toy's own table, in float64."""
    logits = toy_logits(ToySpec.parse(MODEL), tokens).astype(np.float64)
    weights = np.exp(logits - logits.max())
    return float(1.0 / weights.sum())


def test_confidence_is_the_probability_of_the_most_likely_token():
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.0, 0.9]]))
    assert row_confidences(logits) == pytest.approx([0.5, 0.9])
    assert row_confidences(logits[:0]) == []


def test_a_guess_ends_once_its_product_is_below_the_threshold():
    confidence = GuessConfidence(0.25)
    assert [confidence.ends_with(one) for one in (0.9, 0.5, 0.5)] == [False, False, True]
    assert not GuessConfidence(0.0).ends_with(1e-30)
    assert not GuessConfidence(0.5).ends_with(float("nan"))


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_an_unsure_draft_gives_a_prefix_of_its_guess_and_stops_where_it_says(rule):
    lengths = set()
    for first in range(8):
        prompt = [1, 2, first]
        whole, short = [
            run(
                toy_engine("draft", MODEL, draft_confidence_threshold=threshold),
                Caller("a", prompt, sampling_of(rule)).propose(K),
            )[0]
            for threshold in (0.0, THRESHOLD)
        ]
        assert isinstance(whole, ProposeReply)
        assert isinstance(short, ProposeReply)
        product, wanted = 1.0, 0
        while wanted < K and product >= THRESHOLD:
            product *= probability_of_top([*prompt, *whole.draft_token_ids[:wanted]])
            wanted += 1
        assert short.draft_token_ids == whole.draft_token_ids[:wanted]
        lengths.add(wanted)
        if rule is AcceptanceRule.STANDARD:
            assert short.draft_probs is not None
            assert len(short.draft_probs.weights) == wanted
    assert len(lengths) > 1, "the threshold must cut some guesses and leave others"


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_what_is_drafted_ahead_stops_where_an_asked_guess_does(rule):
    """Outcome cache on and off: the same guesses, and no block held for a token beyond them."""
    engines = [
        toy_engine("draft", MODEL, num_cached_outcomes=number, draft_confidence_threshold=THRESHOLD)
        for number in (0, 6)
    ]
    callers = [Caller("a", [1, 2, 3], sampling_of(rule)) for _ in engines]
    rng, lengths = random.Random(5), set()
    for _ in range(60):
        replies = []
        for engine, caller in zip(engines, callers, strict=True):
            (reply,) = run(engine, caller.propose(K))
            assert isinstance(reply, ProposeReply)
            check_pool(engine)
            replies.append(reply)
        plain, cached = replies
        assert cached.draft_token_ids == plain.draft_token_ids
        lengths.add(len(plain.draft_token_ids))
        accepted = plain.draft_token_ids[: rng.randrange(K + 1)]
        emitted = [*accepted, rng.randrange(8)]
        for caller, reply in zip(callers, replies, strict=True):
            caller.heard(reply, len(accepted))
            caller.committed.append(emitted)
    counts = engines[1].load.outcomes
    assert counts is not None
    assert counts.num_hits > 5
    assert len(lengths) > 1
