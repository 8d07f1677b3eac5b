"""Many random rounds against both engines: lost, late, repeated, cancelled, failed over, preempted.

After every operation each engine's pool holds exactly the tokens its sessions claim, no block is
leaked, what a caller may believe is what is cached, and the text equals the plain toy's.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from specserve.errors import Preempted, SessionNotFound
from specserve.model.engine import Engine
from specserve.model.messages import (
    CallFailed,
    Cancel,
    ProposeReply,
    Release,
    Reply,
    VerifyCall,
    VerifyReply,
)
from specserve.model.toy import ToySpec
from specserve.speculation.acceptance import accept
from specserve.speculation.types import (
    AcceptanceRule,
    Proposal,
    SamplingParams,
    TargetScores,
)
from support.engines import CALL_IDS, GREEDY, Caller, check_pool, greedy_decode, run, toy_engine

MODEL = "toy:vocab_size=8,eos_bias=-1000"
SPEC = ToySpec(vocab_size=8, eos_bias=-1000)
MAX_LENGTH = 60


class Request:
    """One request on both engines: rounds, and everything that can go wrong with them."""

    def __init__(self, name: str, rng: random.Random, sampling: SamplingParams) -> None:
        prompt = [rng.randrange(8) for _ in range(rng.choice([1, 3, 4, 7, 8, 9, 16]))]
        self.prompt = prompt
        self.rng = rng
        self.sampling = sampling
        self.on_target = Caller(name, prompt, sampling)
        self.on_draft = Caller(name, prompt, sampling)

    def truth(self, count: int) -> list[int] | None:
        """Return the tokens that must come; None where only their law is known."""
        if self.sampling.rule is AcceptanceRule.GREEDY:
            return greedy_decode(SPEC, self.prompt, count)
        return None

    @property
    def num_emitted(self) -> int:
        return len(self.on_target.committed) - len(self.prompt)

    def propose(self, draft: Engine, k: int) -> Proposal:
        """Ask the draft; on any trouble there is no proposal."""
        rng, caller = self.rng, self.on_draft
        call = caller.propose(k)
        if rng.random() < 0.05:
            return Proposal((), None)  # the call is lost on its way
        draft.submit(call)
        for _ in range(rng.randrange(4)):
            if rng.random() < 0.2:
                draft.submit(replace(call, call_id=next(CALL_IDS)))
            if rng.random() < 0.2:
                draft.submit(Cancel(call.call_id))
            draft.step()
        replies = [r for r in run(draft) if r.session_id == caller.session_id]
        replies += run(draft, replace(call, call_id=next(CALL_IDS)))  # joined, replayed or refused
        check_pool(draft)
        if not replies:
            return Proposal((), None)  # it waits for blocks: late
        reply = replies[-1]
        if isinstance(reply, CallFailed):
            caller.reopen()
            return Proposal((), None)
        assert isinstance(reply, ProposeReply)
        if rng.random() < 0.1:
            return Proposal((), None)  # the reply is lost: nothing is believed
        self._drafted = reply
        return Proposal(reply.draft_token_ids, reply.draft_probs)

    def verify(self, target: Engine, call: VerifyCall, make_room: Callable[[], None]) -> Reply:
        """Run a call to its end; while it waits for blocks another request ends."""
        replies = [r for r in run(target, call) if r.call_id == call.call_id]
        while not replies:
            make_room()
            replies = [r for r in run(target) if r.call_id == call.call_id]
        return replies[-1]

    def round(self, draft: Engine, target: Engine, make_room: Callable[[], None]) -> None:
        """Run one round and commit it."""
        rng, caller = self.rng, self.on_target
        self._drafted: ProposeReply | None = None
        proposal = (
            self.propose(draft, rng.randrange(6)) if rng.random() < 0.8 else Proposal((), None)
        )
        call = caller.verify(proposal.draft_token_ids, proposal.draft_probs)
        if rng.random() < 0.1:
            self.verify(target, call, make_room)  # the reply is lost: the same step comes again
            call = replace(call, call_id=next(CALL_IDS))
        if rng.random() < 0.05:
            run(target, Release(caller.session_id))  # failover: another replica knows nothing
        reply = self.verify(target, call, make_room)
        while isinstance(reply, CallFailed):
            assert isinstance(reply.error, (Preempted, SessionNotFound)), reply
            caller.reopen()
            again = caller.verify(proposal.draft_token_ids, proposal.draft_probs)
            reply = self.verify(target, again, make_room)
        check_pool(target)
        assert isinstance(reply, VerifyReply)
        k, n = len(proposal.draft_token_ids), len(caller.committed)
        assert reply.cached_length == n + k
        verdict = accept(
            proposal,
            TargetScores(reply.target_probs.tolist(), reply.replacement_token_ids),
            [rng.random() for _ in range(k)],
            self.sampling.rule,
        )
        emitted = [*proposal.draft_token_ids[: verdict.num_accepted], verdict.next_token_id]
        caller.heard(reply, verdict.num_accepted)
        assert caller.cached_length == n + verdict.num_accepted
        if self._drafted is not None:
            self.on_draft.heard(self._drafted, verdict.num_accepted)
            assert self.on_draft.cached_length <= n + verdict.num_accepted
        caller.committed.append(emitted)
        self.on_draft.committed.append(emitted)


def play(
    seed: int,
    num_rounds: int,
    num_blocks: int,
    rule: AcceptanceRule,
    make: Callable[[str, random.Random, SamplingParams], Request] = Request,
) -> int:
    """Play rounds of a few requests that `make` makes; return how many tokens were committed."""
    rng = random.Random(seed)
    params = GREEDY if rule is AcceptanceRule.GREEDY else SamplingParams(rule, seed=seed, choice=0)
    target = toy_engine("target", MODEL, num_kv_blocks=num_blocks)
    draft = toy_engine("draft", f"{MODEL},noise=1", num_kv_blocks=num_blocks)
    requests: list[Request] = []
    everyone: list[Request] = []
    for _ in range(num_rounds):
        if len(requests) < 4:
            requests.append(make(str(len(everyone)), rng, params))
            everyone.append(requests[-1])
        request = rng.choice(requests)

        def make_room(running: Request = request) -> None:
            other = next(other for other in requests if other is not running)
            requests.remove(other)
            for engine in (target, draft):
                engine.submit(Release(other.on_target.session_id))

        request.round(draft, target, make_room)
        if len(request.on_target.committed) > MAX_LENGTH or rng.random() < 0.02:
            requests.remove(request)
            for engine in (target, draft):
                run(engine, Release(request.on_target.session_id))
    for engine in (target, draft):
        for request in requests:
            run(engine, Release(request.on_target.session_id))
        check_pool(engine)
        assert engine.load.num_sessions == 0
        assert engine.load.num_free_blocks == num_blocks
    for request in everyone:
        text = request.on_target.committed.tokens[len(request.prompt) :]
        assert request.truth(len(text)) in (None, text)
    return sum(request.num_emitted for request in everyone)


@pytest.mark.parametrize("rule", list(AcceptanceRule))
@pytest.mark.parametrize("num_blocks", [24, 256])
def test_B079_random_rounds_keep_cache_and_callers_in_agreement(rule, num_blocks):
    assert play(seed=num_blocks, num_rounds=120, num_blocks=num_blocks, rule=rule) > 120


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_B079_many_random_rounds_under_memory_pressure(seed):
    assert play(seed, num_rounds=2500, num_blocks=24, rule=AcceptanceRule.GREEDY) > 2500
