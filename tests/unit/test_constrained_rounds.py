"""Constrained sessions on both engines: whatever befalls a session, its rows see its own text."""

import random
from dataclasses import replace

import numpy as np
import pytest

from specserve.model.messages import ProposeReply
from specserve.model.toy import ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer
from specserve.speculation.types import AcceptanceRule, SamplingParams
from support.constrained import Wanted, slow_decode
from support.engines import Caller, check_pool, run, toy_engine
from unit.test_engine_rounds import MODEL, Request, play

TOKEN_BYTES = ToyTokenizer(ToySpec.parse(MODEL)).token_table().token_bytes
WANTED = (
    Wanted(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6),
    Wanted(bad_words=[(1, 2), (3,), (4, 5, 6)], frequency_penalty=0.2),
    Wanted(allowed_token_ids=[1, 2, 4, 6, 7], repetition_penalty=1.1),
    Wanted(regex="(a|bb|c.e)*", letters="abcde", token_bytes=TOKEN_BYTES, frequency_penalty=0.3),
    Wanted(min_tokens=9, stop_token_ids=[2, 5], logit_bias={2: 3.0, 4: -100.0}),
    Wanted(),
)
GREEDY = SamplingParams(AcceptanceRule.GREEDY, seed=1, choice=0, temperature=0.0)


class ConstrainedRequest(Request):
    """A request with constraints of its own, checked against the slow recount."""

    def __init__(self, name: str, rng: random.Random, sampling: SamplingParams) -> None:
        super().__init__(name, rng, sampling)
        self.wanted = WANTED[int(name) % len(WANTED)]
        constraints = self.wanted.constraints(len(self.prompt))
        self.sampling = replace(sampling, constraints=constraints)
        self.on_target = Caller(name, self.prompt, self.sampling)
        self.on_draft = Caller(name, self.prompt, self.sampling)

    def truth(self, count: int) -> list[int] | None:
        """Return the slow recount's tokens; the stop ids end nothing here."""
        if self.sampling.rule is AcceptanceRule.STANDARD:
            return None
        seed = self.sampling.seed if self.sampling.rule is AcceptanceRule.COUPLED else None
        unending = Wanted(**{**vars(self.wanted), "stop_token_ids": ()})
        if self.wanted.min_tokens:
            ends = {*self.wanted.eos_token_ids, *self.wanted.stop_token_ids}
            unending = replace(unending, eos_token_ids=tuple(ends))
        return slow_decode(MODEL, self.prompt, unending, count, seed)


@pytest.mark.parametrize("rule", list(AcceptanceRule))
@pytest.mark.parametrize("num_blocks", [24, 256])
def test_b023_random_rounds_keep_every_state_that_of_its_own_text(rule, num_blocks):
    """Lost, late, repeated, cancelled, failed over, preempted: the slow recount's tokens."""
    played = play(num_blocks + 1, 150, num_blocks, rule, ConstrainedRequest)

    assert played > 150


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AcceptanceRule.GREEDY, AcceptanceRule.COUPLED])
@pytest.mark.parametrize("seed", range(2))
def test_b023_many_random_rounds_under_memory_pressure(rule, seed):
    """The same for longer, with preemptions in plenty."""
    assert play(seed, 1200, 24, rule, ConstrainedRequest) > 1200


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_what_is_drafted_ahead_sees_the_constraints_of_its_own_path(rule):
    """The outcome cache answers with what it would have computed when asked, q and all."""
    model = "toy:vocab_size=8,order=3,eos_bias=-1000"
    hits = 0
    for number, wanted in enumerate(WANTED):
        sampling = GREEDY if rule is AcceptanceRule.GREEDY else SamplingParams(rule, 7, 0)
        prompt = [1, 2, 3, 1 + number]
        sampling = replace(sampling, constraints=wanted.constraints(len(prompt)))
        engines = [toy_engine("draft", model, num_cached_outcomes=n) for n in (0, 6)]
        callers = [Caller("a", prompt, sampling) for _ in engines]
        rng = random.Random(number)
        for _ in range(12):
            replies = []
            for engine, caller in zip(engines, callers, strict=True):
                (reply,) = run(engine, caller.propose(3))
                assert isinstance(reply, ProposeReply)
                check_pool(engine)
                replies.append(reply)
            plain, cached = replies
            assert cached.draft_token_ids == plain.draft_token_ids
            if plain.draft_probs is not None:
                np.testing.assert_array_equal(cached.draft_probs.weights, plain.draft_probs.weights)
            # The target agrees with some of it, and goes on with a token that it may say.
            accepted = plain.draft_token_ids[: rng.randrange(4)]
            emitted = [*accepted, rng.choice([1, 6, 7])]
            for caller, reply in zip(callers, replies, strict=True):
                caller.heard(reply, len(accepted))
                caller.committed.append(emitted)
        hits += engines[1].load.outcomes.num_hits
    assert hits > 5
