"""The orchestrator's idea of both caches is never more than what the services hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from specserve.orchestrator.request_state import CacheView, CallPlan, RequestState
from specserve.speculation.digest import TokenChain
from specserve.speculation.types import AcceptanceRule, Proposal, SamplingParams, Verification

VOCAB_SIZE = 4
"""Small, so that rejected drafts often look like what is committed later."""


def make_state(
    prompt: list[int],
    *,
    k: int = 4,
    max_tokens: int = 10**6,
    max_model_len: int = 10**6,
) -> RequestState:
    """Start a request."""
    return RequestState(
        request_id="r",
        session_id="s",
        sampling=SamplingParams(AcceptanceRule.GREEDY, 0, 0, temperature=0.0),
        prompt_length=len(prompt),
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        num_speculative_tokens=k,
        chain=TokenChain(prompt),
    )


class Mismatch(Exception):
    """The service's answer to a keep_length or digest that is not what it holds."""

    def __init__(self, matching_length: int) -> None:
        super().__init__(matching_length)
        self.matching_length = matching_length


@dataclass(slots=True)
class FakeService:
    """Holds tokens as a draft or target does: keep, append, then what it speculates."""

    chain: TokenChain = field(default_factory=TokenChain)
    epoch: int = 0

    def call(self, plan: CallPlan, speculative: list[int], num_held: int) -> int:
        """Serve a call; returns the length held.

        Args:
            speculative: tokens after the committed ones.
            num_held: of those, how many keep their KV (the draft never feeds its last).
        """
        if plan.opens:
            assert plan.keep_length == 0
            self.chain, self.epoch = TokenChain(), plan.epoch
        assert plan.epoch == self.epoch, "a call of another epoch must open"
        matching = self.chain.matching_length(plan.keep_length, plan.keep_digest)
        if matching < plan.keep_length:
            raise Mismatch(matching)
        self.chain.truncate(plan.keep_length)
        self.chain.append(plan.append_token_ids)
        self.chain.append(speculative[:num_held])
        return len(self.chain)


@dataclass(slots=True)
class Sent:
    """A call that was answered, and its reply as far as it has come."""

    plan: CallPlan
    drafted: list[int]
    reply_length: int
    due: int
    """Rounds until the reply arrives."""


class Simulation:
    """One request over a draft and a target, with everything that may go wrong between them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        prompt = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, 12))]
        self.state = make_state(prompt, k=chance.randrange(0, 9))
        self.draft, self.target = FakeService(), FakeService()
        self.in_flight: Sent | None = None
        self.last_draft: Sent | None = None
        self.last_target: Sent | None = None
        self.limit = chance.choice((3, 1000))

    def check_plan(self, view: CacheView, service: FakeService, plan: CallPlan) -> None:
        """What a call keeps must be committed, and what an opened service is believed to hold."""
        committed = self.state.chain.tokens
        assert plan.committed_length <= len(committed)
        assert plan.keep_length == min(view.cached_length, len(committed) - 1)
        kept_and_appended = committed[plan.keep_length : plan.committed_length]
        assert list(plan.append_token_ids) == kept_and_appended
        assert len(plan.append_token_ids) >= 1
        if view.opened:
            assert service.chain.tokens[: plan.keep_length] == committed[: plan.keep_length]

    def round(self) -> None:
        """Play one round."""
        state, chance = self.state, self.chance
        self.absorb_late()
        drafted: list[int] = []
        if self.in_flight is None and chance.random() < 0.9:
            drafted = self.propose()
        verdict = self.verify(drafted)
        before = state.committed_length
        proposal = Proposal(tuple(drafted), None)
        committed = state.commit(proposal, verdict)
        assert len(committed) == verdict.num_accepted + 1
        assert state.committed_length == before + verdict.num_accepted + 1
        assert committed[: verdict.num_accepted] == tuple(drafted[: verdict.num_accepted])
        self.settle()
        for view in (state.draft, state.target):
            assert 0 <= view.cached_length <= state.committed_length - 1
        if chance.random() < 0.03:
            self.fail_over()

    def absorb_late(self) -> None:
        """Let a late reply in, when its time has come; or lose it with its replica."""
        late = self.in_flight
        if late is None:
            return
        late.due -= 1
        if late.due > 0:
            return
        self.in_flight = None
        if self.chance.random() < 0.2:
            # No reply ever: the session is opened anew elsewhere.
            self.state.draft.reopen()
            self.draft = FakeService()
            self.last_draft = None
            return
        self.last_draft = late
        self.settle()

    def propose(self) -> list[int]:
        """Ask the draft; returns the tokens if they came in time."""
        state, chance = self.state, self.chance
        plan = state.plan_call(state.draft, self.limit)
        self.check_plan(state.draft, self.draft, plan)
        k = state.plan_num_speculative_tokens(0)
        if plan.committed_length < state.committed_length:
            k = 0
        k = min(k, chance.randrange(0, 9))
        drafted = [chance.randrange(VOCAB_SIZE) for _ in range(k)]
        try:
            length = self.draft.call(plan, drafted, max(0, k - 1))
        except Mismatch as mismatch:
            state.correct(state.draft, mismatch.matching_length)
            return []
        sent = Sent(plan, drafted, length, due=chance.randrange(1, 30))
        if chance.random() < 0.15:
            before = state.draft.cached_length, state.draft.opened
            self.in_flight = sent
            assert (state.draft.cached_length, state.draft.opened) == before
            return []
        self.last_draft = sent
        self.settle()
        return drafted

    def verify(self, drafted: list[int]) -> Verification:
        """Score on the target, over mismatches and lost replicas; absorb as decode-ahead does."""
        state, chance = self.state, self.chance
        while True:
            plan = state.plan_call(state.target, self.limit)
            self.check_plan(state.target, self.target, plan)
            is_piece = plan.committed_length < state.committed_length
            try:
                length = self.target.call(plan, [] if is_piece else drafted, len(drafted))
            except Mismatch as mismatch:
                state.correct(state.target, mismatch.matching_length)
                continue
            if chance.random() < 0.02:
                # The reply was lost with the replica: the same proposal goes to another.
                state.target.reopen()
                self.target = FakeService()
                continue
            if is_piece:
                state.absorb(state.target, plan, length, ())
                continue
            break
        num_accepted = chance.choice((0, len(drafted), chance.randrange(len(drafted) + 1)))
        token = chance.randrange(VOCAB_SIZE)
        self.last_target = Sent(plan, drafted, length, 0)
        if not drafted and chance.random() < 0.3:
            return self.decode_ahead(plan)
        return Verification(num_accepted, token)

    def decode_ahead(self, plan: CallPlan) -> Verification:
        """Commit some tokens of one call as they stream; the last one is left to the round."""
        state, chance = self.state, self.chance
        decoded: list[int] = []
        for _ in range(chance.randrange(1, 5)):
            token = chance.randrange(VOCAB_SIZE)
            length = plan.committed_length + len(decoded)
            assert len(self.target.chain) == length
            state.commit(Proposal((), None), Verification(0, token))
            state.absorb(state.target, plan, length, tuple(decoded))
            assert state.target.cached_length == length
            decoded.append(token)
            self.target.chain.append((token,))
        self.last_target = Sent(plan, list(decoded), len(self.target.chain), 0)
        return Verification(0, chance.randrange(VOCAB_SIZE))

    def settle(self) -> None:
        """Absorb both last replies, as often as one likes: duplicates change nothing."""
        state = self.state
        for _ in range(self.chance.choice((1, 2))):
            if self.last_draft is not None:
                sent = self.last_draft
                state.absorb(state.draft, sent.plan, sent.reply_length, sent.drafted)
            if self.last_target is not None:
                sent = self.last_target
                state.absorb(state.target, sent.plan, sent.reply_length, sent.drafted)

    def fail_over(self) -> None:
        """Lose a replica between rounds, or find it holding something else."""
        state, chance = self.state, self.chance
        match chance.randrange(5):
            case 0:
                state.draft.reopen()
                self.draft, self.in_flight = FakeService(), None
            case 1:
                state.target.reopen()
                self.target = FakeService()
            case 2 if state.target.opened and len(self.target.chain):
                # Its content was cut behind our back: a mismatch says how far it still goes.
                self.target.chain.truncate(chance.randrange(len(self.target.chain)))
                self.find_mismatch(state.target, self.target)
            case 3 if state.draft.opened and len(self.draft.chain) and not self.in_flight:
                self.draft.chain.truncate(chance.randrange(len(self.draft.chain)))
                self.find_mismatch(state.draft, self.draft)
            case _:
                pass

    def find_mismatch(self, view: CacheView, service: FakeService) -> None:
        """Let a call find that something is missing, and be corrected by the answer."""
        state = self.state
        plan = state.plan_call(view, self.limit)
        try:
            length = service.call(plan, [], 0)
        except Mismatch as mismatch:
            state.correct(view, mismatch.matching_length)
        else:
            state.absorb(view, plan, length, ())


@pytest.mark.slow
def test_caches_hold_what_is_committed_over_100000_random_rounds() -> None:
    """K = 0, partial and full acceptance, late, lost, repeated replies, failover, decode-ahead.

    Whenever a call is planned, what it keeps of an opened service is what was committed; every
    round commits num_accepted + 1 tokens; no view ever reaches the newest committed token.
    """
    chance = random.Random(20_260_101)
    for _ in range(1000):
        simulation = Simulation(chance)
        for _ in range(100):
            simulation.round()


def _round(
    state: RequestState,
    drafted: tuple[int, ...],
    num_accepted: int,
    next_token_id: int,
) -> tuple[int, ...]:
    """Play a round in which both services answer at once."""
    draft_plan = state.plan_call(state.draft, 1000)
    state.absorb(
        state.draft, draft_plan, draft_plan.committed_length + max(0, len(drafted) - 1), drafted
    )
    target_plan = state.plan_call(state.target, 1000)
    committed = state.commit(Proposal(drafted, None), Verification(num_accepted, next_token_id))
    state.absorb(
        state.draft, draft_plan, draft_plan.committed_length + max(0, len(drafted) - 1), drafted
    )
    state.absorb(state.target, target_plan, target_plan.committed_length + len(drafted), drafted)
    return committed


def test_third_of_four_candidates_rejected_commits_three_tokens() -> None:
    """K = 4: two accepted and one recovered token; the context grows by 3."""
    state = make_state([1, 2, 3])
    assert _round(state, (10, 11, 12, 13), 2, 99) == (10, 11, 99)
    assert state.committed_length == 6
    assert state.target.cached_length == 5  # N + A
    assert state.draft.cached_length == 5  # min(N + K - 1, N + A)
    for view in (state.target, state.draft):
        plan = state.plan_call(view, 1000)
        assert (plan.keep_length, plan.append_token_ids) == (5, (99,))


def test_full_acceptance_appends_two_tokens_to_the_draft_B124() -> None:
    """The draft never fed its last token: it and the bonus token follow. The target needs one."""
    state = make_state([1, 2, 3])
    assert _round(state, (10, 11, 12, 13), 4, 99) == (10, 11, 12, 13, 99)
    assert state.draft.cached_length == 6  # N + K - 1
    assert state.target.cached_length == 7  # N + K
    assert state.plan_call(state.draft, 1000).append_token_ids == (13, 99)
    assert state.plan_call(state.target, 1000).append_token_ids == (99,)


def test_nothing_accepted_grows_by_exactly_one_B115() -> None:
    """A draft that is always wrong, K = 5, ten rounds: one token a round."""
    state = make_state([1], k=5)
    for number in range(10):
        assert _round(state, (7,) * 5, 0, 8) == (8,)
        assert state.committed_length == 2 + number
        assert state.target.cached_length == state.draft.cached_length == 1 + number


def test_rounds_without_draft_leave_it_behind_and_it_catches_up() -> None:
    """K = 0 rounds move the target only; the draft is told all of it when it is asked again."""
    state = make_state([1, 2])
    _round(state, (5,), 0, 6)
    for token in (7, 8, 9):
        plan = state.plan_call(state.target, 1000)
        state.commit(Proposal((), None), Verification(0, token))
        state.absorb(state.target, plan, plan.committed_length, ())
    assert state.target.cached_length == 5
    assert state.draft.cached_length == 2
    assert state.plan_call(state.draft, 1000).append_token_ids == (6, 7, 8, 9)


def test_draft_that_recovers_after_a_rejection_keeps_drafting_k_tokens_B124() -> None:
    """After a forced rejection the next call keeps all that is committed but the newest token."""
    state = make_state([1, 2, 3])
    _round(state, (4, 5, 6, 7), 4, 8)
    _round(state, (9, 9, 9, 9), 0, 1)
    plan = state.plan_call(state.draft, 1000)
    assert plan.keep_length == state.committed_length - 1
    assert state.plan_num_speculative_tokens(0) == 4


def test_late_reply_counts_only_what_was_committed_since() -> None:
    """A reply many rounds late moves the draft to what it drafted rightly, not further."""
    state = make_state([1, 2])
    late = state.plan_call(state.draft, 1000)
    for token in (5, 6, 7, 8):
        state.commit(Proposal((), None), Verification(0, token))
    assert state.draft.cached_length == 0
    assert not state.draft.opened
    state.absorb(state.draft, late, 5, (5, 6, 9, 8))
    assert state.draft.opened
    assert state.draft.cached_length == 4


def test_reply_of_an_older_epoch_or_step_is_ignored() -> None:
    """What a session held before it moved, or before a newer call, says nothing of now."""
    state = make_state([1, 2])
    old = state.plan_call(state.draft, 1000)
    state.draft.reopen()
    state.absorb(state.draft, old, 2, ())
    assert (state.draft.cached_length, state.draft.opened) == (0, False)
    first = state.plan_call(state.draft, 1000)
    second = state.plan_call(state.draft, 1000)
    assert (first.epoch, first.step, second.step) == (2, 1, 2)
    state.absorb(state.draft, first, 2, ())
    assert (state.draft.cached_length, state.draft.opened) == (0, False)


def test_steps_rise_and_epochs_start_anew() -> None:
    """Each call has a step of its own; the first call of an epoch opens and keeps nothing."""
    state = make_state([1, 2])
    for step in (1, 2, 3):
        plan = state.plan_call(state.target, 1000)
        assert (plan.epoch, plan.step, plan.opens) == (1, step, step == 1)
        state.absorb(state.target, plan, 2, ())
    state.target.reopen()
    plan = state.plan_call(state.target, 1000)
    assert (plan.epoch, plan.step, plan.opens, plan.keep_length) == (2, 1, True, 0)
    assert plan.keep_digest == 0


def test_k_shrinks_to_what_may_still_be_output_B052_B082_B083() -> None:
    """Never past max_tokens, the context or the draft's own limit; never negative."""
    state = make_state([1] * 10, k=4, max_tokens=6, max_model_len=100)
    assert state.plan_num_speculative_tokens(0) == 4
    for committed, k in ((1, 4), (2, 3), (3, 2), (4, 1), (5, 0), (6, 0)):
        state.commit(Proposal((), None), Verification(0, 1))
        assert state.num_output_tokens == committed
        assert state.plan_num_speculative_tokens(0) == k
    near_end = make_state([1] * 60, k=4, max_model_len=64)
    assert near_end.num_remaining_tokens == 4
    assert near_end.plan_num_speculative_tokens(0) == 3
    for limit, k in ((0, 4), (100, 4), (13, 3), (10, 0), (5, 0)):
        assert make_state([1] * 10).plan_num_speculative_tokens(limit) == k


def test_rollback_never_goes_below_nothing_B088() -> None:
    """A call given up between draft and verify leaves no stale count: keep is what was replied."""
    state = make_state([1, 2, 3], max_tokens=3)
    state.plan_call(state.draft, 1000)
    state.plan_call(state.target, 1000)
    plan = state.plan_call(state.draft, 1000)
    assert plan.keep_length == 0
    state.correct(state.draft, 0)
    state.absorb(state.draft, plan, 0, ())
    assert state.draft.cached_length == 0
    assert state.plan_call(state.draft, 1000).append_token_ids == (1, 2, 3)


def test_service_that_claims_more_than_there_is_is_not_believed() -> None:
    """A length beyond the committed tokens is cut to all but the newest."""
    state = make_state([1, 2, 3])
    plan = state.plan_call(state.draft, 1000)
    state.absorb(state.draft, plan, 2**32 - 1, ())
    assert state.draft.cached_length == 2


def test_long_prompt_goes_in_pieces() -> None:
    """Each piece keeps the ones before and appends the next; none skips or repeats a token."""
    prompt = list(range(10))
    state = make_state(prompt)
    seen: list[int] = []
    for _ in range(4):
        plan = state.plan_call(state.target, 3)
        assert plan.keep_length == len(seen)
        seen += plan.append_token_ids
        state.absorb(state.target, plan, plan.committed_length, ())
    assert seen == prompt
