"""The engine against a toy model: sessions, rollback, replies, decode-ahead, prefix cache."""

from dataclasses import replace

import numpy as np
import pytest

from specserve.errors import (
    CacheMismatch,
    CapacityExhausted,
    DeadlineExpired,
    InvalidProposal,
    NonFiniteLogits,
    Preempted,
    SessionNotFound,
    SpecServeError,
    StaleStep,
)
from specserve.model.engine import Engine
from specserve.model.messages import (
    CallFailed,
    Cancel,
    ProposeReply,
    Release,
    Reply,
    VerifyReply,
)
from specserve.model.toy import ToySpec
from specserve.speculation.types import AcceptanceRule, SamplingParams, SparseProbs
from support.engines import (
    CALL_IDS,
    GREEDY,
    Caller,
    Clock,
    check_pool,
    greedy_decode,
    run,
    toy_engine,
)

SPEC = ToySpec(vocab_size=16, eos_bias=-1000)
STANDARD = SamplingParams(AcceptanceRule.STANDARD, seed=3, choice=0)
COUPLED = SamplingParams(AcceptanceRule.COUPLED, seed=3, choice=0)
PROMPT = [3, 1, 4, 1, 5]


def verified(reply: Reply) -> VerifyReply:
    assert isinstance(reply, VerifyReply), reply
    return reply


def proposed(reply: Reply) -> ProposeReply:
    assert isinstance(reply, ProposeReply), reply
    return reply


def error_of(reply: Reply) -> SpecServeError:
    assert isinstance(reply, CallFailed), reply
    return reply.error


def opened(engine: Engine, caller: Caller) -> int:
    """Open a session on a target by its first K = 0 round; return the first token."""
    reply = verified(run(engine, caller.verify())[0])
    caller.heard(reply)
    caller.committed.append(reply.replacement_token_ids)
    return reply.replacement_token_ids[0]


# Rounds


def test_a_round_of_k_zero_is_a_decode_step():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    tokens = [opened(engine, caller) for _ in range(6)]
    assert tokens == greedy_decode(SPEC, PROMPT, 6)
    assert caller.cached_length == len(PROMPT) + 5
    check_pool(engine)


def test_verify_scores_k_plus_one_rows_and_holds_n_plus_k():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    opened(engine, caller)
    expected = greedy_decode(SPEC, caller.committed.tokens, 5)
    drafts = [*expected[:2], (expected[2] + 1) % 16, 7]
    reply = verified(run(engine, caller.verify(drafts))[0])
    assert reply.target_probs.tolist()[:3] == [1.0, 1.0, 0.0]
    assert reply.replacement_token_ids[:3] == tuple(expected[:3])
    assert len(reply.replacement_token_ids) == 5
    assert reply.cached_length == len(caller.committed) + 4
    check_pool(engine)


def test_B115_B124_rollback_by_length_leaves_the_state_of_a_fresh_prefill():
    """Always-wrong drafts: one token commits a round, and the text is the plain one."""
    engine, caller = toy_engine(), Caller("a", PROMPT)
    opened(engine, caller)
    for _ in range(10):
        expected = greedy_decode(SPEC, caller.committed.tokens, 1)[0]
        drafts = [(expected + 1) % 16] * 5
        reply = verified(run(engine, caller.verify(drafts))[0])
        assert reply.replacement_token_ids[0] == expected
        before = len(caller.committed)
        caller.heard(reply)
        assert caller.cached_length == before
        caller.committed.append([expected])
        check_pool(engine)
    assert caller.committed.tokens[5:] == greedy_decode(SPEC, PROMPT, 11)


def test_B124_an_equal_draft_agrees_again_right_after_a_rejection():
    target, draft = toy_engine(), toy_engine("draft")
    on_target, on_draft = Caller("a", PROMPT), Caller("a", PROMPT)
    for round_index in range(8):
        proposal = proposed(run(draft, on_draft.propose(4))[0])
        drafts = list(proposal.draft_token_ids)
        assert len(drafts) == 4
        if round_index == 3:
            drafts[1] = (drafts[1] + 1) % 16
        reply = verified(run(target, on_target.verify(drafts))[0])
        accepted = 1 if round_index == 3 else 4
        assert reply.target_probs.tolist()[:accepted] == [1.0] * accepted
        emitted = [*drafts[:accepted], reply.replacement_token_ids[accepted]]
        on_target.heard(reply, accepted)
        on_draft.heard(proposal, accepted)
        assert on_draft.cached_length == len(on_draft.committed) + min(accepted, 3)
        on_target.committed.append(emitted)
        on_draft.committed.append(emitted)
        check_pool(target)
        check_pool(draft)


def test_an_empty_append_steps_back_by_one_token():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    (reply,) = run(engine, caller.verify(append_only=True))
    assert verified(reply).replacement_token_ids == ()
    caller.heard(verified(reply))
    assert caller.cached_length == len(PROMPT)
    (reply,) = run(engine, caller.verify([1, 2]))
    assert verified(reply).replacement_token_ids[0] == greedy_decode(SPEC, PROMPT, 1)[0]
    assert verified(reply).cached_length == len(PROMPT) + 2
    check_pool(engine)


def test_B088_a_shorter_round_after_a_lost_one_trims_from_the_same_numbers():
    """The caller closes between draft and verify: the draft rolls back to what it proved."""
    draft, caller = toy_engine("draft"), Caller("a", PROMPT)
    first = proposed(run(draft, caller.propose(4))[0])
    caller.heard(first)  # nothing accepted, and the next round is short
    assert caller.cached_length == len(PROMPT)
    for k in (1, 0, 1):
        reply = proposed(run(draft, caller.propose(k))[0])
        assert reply.draft_token_ids == first.draft_token_ids[:k]
        assert reply.cached_length == len(PROMPT) + max(0, k - 1)
        check_pool(draft)


def test_B116_neighbours_of_any_length_change_nothing():
    engine = toy_engine(max_num_batched_tokens=128)
    callers = [Caller("a", PROMPT), Caller("b", [1, 2, 3]), Caller("c", list(range(1, 11)) * 30)]
    texts: list[list[int]] = [[], [], []]
    for _ in range(5):
        for reply in run(engine, *(caller.verify() for caller in callers)):
            index = "abc".index(verified(reply).session_id)
            texts[index].extend(verified(reply).replacement_token_ids)
            callers[index].heard(verified(reply))
            callers[index].committed.append(verified(reply).replacement_token_ids)
    assert [
        text == greedy_decode(SPEC, c.committed.tokens[:-5], 5)
        for text, c in zip(texts, callers, strict=True)
    ] == [True] * 3


def test_B118_ragged_drafts_in_one_batch_equal_their_solo_runs():
    engine, solo = toy_engine(), toy_engine()
    callers = [Caller(str(k), [k + 1, 2, 3]) for k in range(5)]
    for caller in callers:
        opened(engine, caller)
    calls = [caller.verify([7] * k) for k, caller in enumerate(callers)]
    together = {reply.session_id: verified(reply) for reply in run(engine, *calls)}
    assert all(reply.timing.batch_size == 5 for reply in together.values())
    for k in range(5):
        alone = Caller(str(k), [k + 1, 2, 3])
        opened(solo, alone)
        reply = verified(run(solo, alone.verify([7] * k))[0])
        assert reply.replacement_token_ids == together[str(k)].replacement_token_ids
        assert reply.target_probs.tolist() == together[str(k)].target_probs.tolist()


def test_sessions_at_different_draft_depths_share_a_forward():
    draft = toy_engine("draft")
    callers = [Caller(str(k), [k + 1, 2, 3]) for k in range(1, 5)]
    run(draft, *(caller.propose(k) for k, caller in enumerate(callers, 1)))
    assert draft.load.num_iterations == 4


def test_B119_an_empty_draft_is_a_plain_step_and_leaves_nothing_behind():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    for round_index in range(6):
        n = len(caller.committed)
        drafts = greedy_decode(SPEC, caller.committed.tokens, 2) if round_index % 2 else []
        reply = verified(run(engine, caller.verify(drafts))[0])
        caller.heard(reply, len(drafts))
        caller.committed.append([*drafts, reply.replacement_token_ids[len(drafts)]])
        assert len(caller.committed) == n + len(drafts) + 1
    assert caller.committed.tokens[5:] == greedy_decode(SPEC, PROMPT, 12)


def test_B035_an_invalid_drafted_id_is_a_rejection_and_shapes_stay():
    engine, caller = toy_engine(), Caller("a", PROMPT, STANDARD)
    opened(engine, caller)
    n = len(caller.committed)
    q = SparseProbs(
        np.array([[1, 2], [-1, 5], [3, 2**31 - 1]], np.int32), np.ones((3, 2), np.float32)
    )
    reply = verified(run(engine, caller.verify([1, -1, 3], q))[0])
    assert reply.target_probs[0] > 0
    assert reply.target_probs[1:].tolist() == [0.0, 0.0]
    assert len(reply.replacement_token_ids) == 4
    assert all(0 <= token < 16 for token in reply.replacement_token_ids)
    assert reply.cached_length == n + 1
    for bad in (16, 2**31 - 1):
        reply = verified(run(engine, caller.verify([bad, 1, 3], q))[0])
        assert reply.target_probs.tolist() == [0.0, 0.0, 0.0]


def test_B028_q_follows_its_session_and_a_missing_q_is_an_error():
    target, draft = toy_engine(), toy_engine("draft", "toy:vocab_size=16,noise=1")
    params = [replace(STANDARD, seed=i) for i in range(3)]
    callers = [Caller(str(i), [i + 1, 5], p) for i, p in enumerate(params)]
    together = {r.session_id: proposed(r) for r in run(draft, *(c.propose(3) for c in callers))}
    for i, caller in enumerate(callers):
        solo = proposed(
            run(
                toy_engine("draft", "toy:vocab_size=16,noise=1"),
                Caller("x", [i + 1, 5], params[i]).propose(3),
            )[0]
        )
        ours = together[caller.session_id]
        assert ours.draft_token_ids == solo.draft_token_ids
        assert ours.draft_probs is not None
        assert solo.draft_probs is not None
        assert np.array_equal(ours.draft_probs.token_ids, solo.draft_probs.token_ids)
        assert np.array_equal(ours.draft_probs.weights, solo.draft_probs.weights)
    for q in (
        None,
        SparseProbs(np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)),
        SparseProbs(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32)),
        SparseProbs(np.zeros((1, 1), np.int32), -np.ones((1, 1), np.float32)),
        SparseProbs(np.zeros((1, 1), np.int32), np.full((1, 1), np.nan, np.float32)),
    ):
        (reply,) = run(target, Caller("y", PROMPT, STANDARD).verify([1], q))
        assert isinstance(error_of(reply), InvalidProposal)
    assert target.load.num_sessions == 0


def test_draft_probs_go_out_for_the_standard_rule_only():
    for params, has_q in ((STANDARD, True), (COUPLED, False), (GREEDY, False)):
        reply = proposed(run(toy_engine("draft"), Caller("a", PROMPT, params).propose(2))[0])
        assert (reply.draft_probs is not None) is has_q


def test_logprobs_have_a_row_for_each_position():
    engine = toy_engine()
    caller = Caller("a", PROMPT, replace(GREEDY, num_logprobs=3))
    opened(engine, caller)
    logprobs = verified(run(engine, caller.verify([1, 2, 99]))[0]).logprobs
    assert logprobs is not None
    assert logprobs.draft.shape == (3,)
    assert logprobs.replacement.shape == (4,)
    assert logprobs.top.shape == logprobs.top_token_ids.shape == (4, 3)


# Session rules


def test_a_call_without_session_or_opening_is_not_found():
    caller = Caller("a", PROMPT)
    (reply,) = run(toy_engine(), replace(caller.verify(), opening=None))
    assert isinstance(error_of(reply), SessionNotFound)


def test_a_kept_length_that_is_not_held_names_what_may_match():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    opened(engine, caller)
    error = error_of(run(engine, replace(caller.verify(), keep_length=9, keep_digest=1))[0])
    assert isinstance(error, CacheMismatch)
    assert (error.matching_length, error.keep_length) == (5, 9)
    error = error_of(run(engine, replace(caller.verify(), keep_digest=1))[0])
    assert isinstance(error, CacheMismatch)
    assert error.matching_length == 0
    # The session is as it was: the right call goes through.
    assert verified(run(engine, caller.verify())[0]).cached_length == 6
    # A session that is not held keeps nothing.
    error = error_of(
        run(engine, replace(Caller("b", PROMPT).verify(), keep_length=2, keep_digest=1))[0]
    )
    assert isinstance(error, CacheMismatch)
    assert engine.load.num_sessions == 1


def test_older_steps_and_epochs_are_refused_and_steps_may_skip():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    opened(engine, caller)
    caller.step = 7
    call = caller.verify()
    assert verified(run(engine, call)[0]).step == 8
    assert isinstance(error_of(run(engine, replace(call, step=7))[0]), StaleStep)
    run(engine, replace(call, epoch=2, step=1))
    assert isinstance(error_of(run(engine, replace(call, epoch=1, step=99))[0]), StaleStep)
    assert verified(run(engine, replace(call, epoch=2, step=2))[0]).cached_length == 6


def test_a_repeated_step_gets_the_stored_reply():
    engine, caller = toy_engine(), Caller("a", PROMPT, COUPLED)
    call = caller.verify()
    first = verified(run(engine, call)[0])
    iterations = engine.load.num_iterations
    again = verified(run(engine, replace(call, call_id=77_000_000))[0])
    assert again.call_id == 77_000_000
    assert again.replacement_token_ids == first.replacement_token_ids
    assert engine.load.num_iterations == iterations
    check_pool(engine)


def test_the_same_step_in_flight_is_joined():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    call = caller.verify()
    replies = run(engine, call, replace(call, call_id=77_000_001))
    assert [reply.call_id for reply in replies] == [call.call_id, 77_000_001]
    assert engine.load.num_iterations == 1


def test_a_newer_step_ends_the_older_call():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    first, second = caller.verify(), caller.verify()
    stale, reply = run(engine, first, second)
    assert stale.call_id == first.call_id
    assert isinstance(error_of(stale), StaleStep)
    assert verified(reply).call_id == second.call_id


def test_a_failed_step_may_be_tried_again():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    opened(engine, caller)
    call = caller.verify()
    assert isinstance(error_of(run(engine, replace(call, keep_digest=1))[0]), CacheMismatch)
    assert verified(run(engine, call)[0]).step == call.step


def test_a_release_shows_that_an_idle_device_lives():
    """Where an answer was lost on its way no call is left to move the count of iterations."""
    engine, caller = toy_engine(), Caller("a", PROMPT)
    opened(engine, caller)
    before = engine.load.num_iterations
    run(engine, Release("a"))
    assert engine.load.num_iterations > before


def test_release_is_idempotent_and_answers_the_call_in_flight():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    call = caller.verify()
    (reply,) = run(engine, call, Release("a"), Release("a"), Release("never"))
    assert isinstance(error_of(reply), SessionNotFound)
    assert engine.load.num_free_blocks == engine.load.num_blocks
    assert engine.load.num_sessions == 0


def test_a_lost_reply_costs_no_second_prefill():
    """The cache beyond keep_length is invisible, but equal tokens need no second forward."""
    engine, caller = toy_engine(enable_prefix_caching=False), Caller("a", PROMPT * 4)
    opened(engine, caller)
    caller.cached_length = 0
    reply = verified(run(engine, caller.verify())[0])
    assert reply.replacement_token_ids[0] == greedy_decode(SPEC, caller.committed.tokens, 1)[0]
    assert reply.timing.rows == 1
    check_pool(engine)


def test_an_engine_takes_the_calls_of_its_role_only():
    (reply,) = run(toy_engine("target"), Caller("a", PROMPT).propose(1))
    assert isinstance(error_of(reply), InvalidProposal)


@pytest.mark.parametrize("prompt", [[], [16], [-1]])
def test_calls_that_can_never_be_served_are_refused(prompt):
    engine = toy_engine()
    assert isinstance(error_of(run(engine, Caller("a", prompt).verify())[0]), InvalidProposal)
    assert engine.load.num_sessions == 0


# Cancel


def test_a_cancelled_verify_is_answered_deadline_expired_and_leaves_the_session():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    opened(engine, caller)
    call = caller.verify([1, 2])
    engine.submit(call)
    assert isinstance(error_of(run(engine, Cancel(call.call_id))[0]), DeadlineExpired)
    assert len(verified(run(engine, caller.verify([1]))[0]).replacement_token_ids) == 2
    run(engine, Cancel(123_456))


def test_cancelling_one_of_two_joined_calls_leaves_the_other():
    engine, caller = toy_engine(), Caller("a", PROMPT)
    call = caller.verify()
    failed, reply = run(engine, call, replace(call, call_id=77_000_002), Cancel(call.call_id))
    assert isinstance(error_of(failed), DeadlineExpired)
    assert failed.call_id == call.call_id
    assert verified(reply).call_id == 77_000_002


def test_a_cancelled_propose_keeps_what_was_drawn():
    draft, caller = toy_engine("draft"), Caller("a", PROMPT, STANDARD)
    call = caller.propose(4)
    draft.submit(call)
    draft.step()
    draft.step()
    reply = proposed(run(draft, Cancel(call.call_id))[0])
    assert len(reply.draft_token_ids) == 2
    assert reply.draft_probs is not None
    assert len(reply.draft_probs.token_ids) == 2
    assert reply.cached_length == len(PROMPT) + 1
    check_pool(draft)


def test_a_cancelled_propose_still_completes_its_append():
    draft, caller = toy_engine("draft", max_num_batched_tokens=65), Caller("a", PROMPT * 40)
    call = caller.propose(4)
    draft.submit(call)
    draft.step()
    reply = proposed(run(draft, Cancel(call.call_id))[0])
    assert reply.draft_token_ids == ()
    assert reply.cached_length == 200
    check_pool(draft)


# Decode-ahead


@pytest.mark.parametrize("params", [GREEDY, STANDARD, COUPLED])
def test_decode_ahead_equals_repeated_rounds_of_k_zero(params):
    engine = toy_engine()
    ahead, single = Caller("a", PROMPT, params), Caller("b", PROMPT, params)
    replies = [verified(reply) for reply in run(engine, ahead.verify(num_decode_steps=7))]
    assert [reply.more_follows for reply in replies] == [True] * 6 + [False]
    assert [reply.cached_length for reply in replies] == list(range(5, 12))
    assert [reply.replacement_token_ids[0] for reply in replies] == [
        opened(engine, single) for _ in range(7)
    ]
    check_pool(engine)
    ahead.heard(replies[-1], num_drafted_valid=6)
    ahead.committed.append(reply.replacement_token_ids[0] for reply in replies)
    assert opened(engine, ahead) == opened(engine, single)


def test_decode_ahead_stops_at_a_stop_token():
    expected = greedy_decode(SPEC, PROMPT, 8)
    stop = expected[3]
    caller = Caller("a", PROMPT, replace(GREEDY, stop_token_ids=(stop,)))
    replies = run(toy_engine(), caller.verify(num_decode_steps=8))
    assert len(replies) == expected.index(stop) + 1
    assert not verified(replies[-1]).more_follows


def test_B076_decode_ahead_ends_cleanly_on_cancel_and_replays():
    """Also as the first thing a fresh engine ever does."""
    engine, caller = toy_engine(), Caller("a", PROMPT)
    call = caller.verify(num_decode_steps=9)
    engine.submit(call)
    sent = [output.replies[0] for output in (engine.step(), engine.step()) if output]
    (joined_first, joined_second) = run_one(engine, replace(call, call_id=77_000_003))
    assert verified(joined_first).replacement_token_ids == verified(sent[0]).replacement_token_ids
    assert joined_second.call_id == 77_000_003
    (gone,) = run_one(engine, Cancel(call.call_id))
    assert isinstance(error_of(gone), DeadlineExpired)
    (last,) = run(engine, Cancel(77_000_003))
    assert (verified(last).more_follows, verified(last).replacement_token_ids) == (False, ())
    assert verified(last).cached_length == len(PROMPT) + 1
    assert len(run(engine, replace(call, call_id=77_000_004))) == 3
    check_pool(engine)


def run_one(engine: Engine, message: object) -> list[Reply]:
    """Submit a message and take only what is answered without a forward."""
    engine.submit(message)  # type: ignore[arg-type]
    output = engine.step()
    return [] if output is None else list(output.replies)


# Context and capacity


@pytest.mark.parametrize("prompt_length", [59, 60, 63, 64])
def test_B082_decode_ahead_ends_exactly_at_the_context(prompt_length):
    engine = toy_engine(max_model_len=64)
    prompt = (PROMPT * 13)[:prompt_length]
    replies = run(engine, Caller("a", prompt).verify(num_decode_steps=20))
    assert len(replies) == max(1, 64 - prompt_length)
    assert not verified(replies[-1]).more_follows
    (reply,) = run(engine, Caller("b", (PROMPT * 13)[:62]).verify([1, 2, 3]))
    error = error_of(reply)
    assert isinstance(error, CapacityExhausted)
    assert (error.wanted, error.available) == (65, 64)


@pytest.mark.parametrize("room", range(9))
def test_B083_B085_drafting_stops_at_the_context(room):
    draft = toy_engine("draft", max_model_len=64)
    reply = proposed(run(draft, Caller("a", (PROMPT * 13)[: 64 - room]).propose(5))[0])
    assert len(reply.draft_token_ids) == min(5, room)
    check_pool(draft)
    (reply,) = run(draft, Caller("b", PROMPT * 13).propose(0))
    assert isinstance(error_of(reply), CapacityExhausted)


def test_B080_one_session_may_fill_the_pool_and_then_fails_alone():
    engine, caller = toy_engine(num_kv_blocks=4), Caller("a", PROMPT)
    while True:
        (reply,) = run(engine, caller.verify())
        if isinstance(reply, CallFailed):
            break
        caller.heard(verified(reply))
        caller.committed.append(verified(reply).replacement_token_ids)
        check_pool(engine)
    assert isinstance(reply.error, CapacityExhausted)
    assert len(caller.committed) == 17
    run(engine, Release("a"))
    assert verified(run(engine, Caller("b", PROMPT).verify())[0]).cached_length == 5


def test_nan_rows_fail_their_session_alone():
    engine = toy_engine(model="toy:vocab_size=16,nan_token=9,inf_token=10")
    replies = run(
        engine,
        Caller("good", PROMPT).verify(),
        Caller("nan", [3, 9]).verify(),
        Caller("inf", [3, 10]).verify(),
        Caller("middle", PROMPT).verify([1, 9, 2]),
    )
    errors = {r.session_id: error_of(r) for r in replies if isinstance(r, CallFailed)}
    assert set(errors) == {"nan", "inf"}
    assert all(isinstance(e, NonFiniteLogits) and e.row == 0 for e in errors.values())
    # A row that only a rejected draft leads to costs nothing: no token, and nothing is accepted.
    (middle,) = (r for r in replies if r.session_id == "middle")
    assert middle.replacement_token_ids[2] == -1
    assert middle.target_probs[2] == 0.0
    check_pool(engine)


def test_a_draft_stops_before_an_unusable_row_and_fails_on_the_first():
    model = "toy:vocab_size=16,order=1,sharpness=3,eos_bias=-1000"
    text = greedy_decode(ToySpec.parse(model), [3], 3)
    draft = toy_engine("draft", f"{model},nan_token={text[1]}")
    reply = proposed(run(draft, Caller("a", [3]).propose(4))[0])
    assert list(reply.draft_token_ids) == text[:2]
    (reply,) = run(draft, Caller("b", [text[1]]).propose(4))
    assert isinstance(error_of(reply), NonFiniteLogits)


# Prefix cache


def test_a_repeated_prompt_skips_its_full_blocks_and_answers_the_same():
    engine = toy_engine()
    prompt = PROMPT * 4
    first = verified(run(engine, Caller("a", prompt).verify())[0])
    second = verified(run(engine, Caller("b", prompt).verify())[0])
    assert (first.prefix_cached_tokens, second.prefix_cached_tokens) == (0, 16)
    assert second.timing.rows == 4
    assert second.replacement_token_ids == first.replacement_token_ids
    run(engine, Release("a"), Release("b"))
    assert verified(run(engine, Caller("c", prompt).verify())[0]).prefix_cached_tokens == 16
    assert engine.load.num_free_blocks == engine.load.num_blocks - 5
    check_pool(engine)


def test_the_tenant_salt_separates_and_a_switched_salt_drops_the_content():
    engine, prompt = toy_engine(), PROMPT * 4
    run(engine, Caller("a", prompt, tenant_salt=b"one").verify())
    (reply,) = run(engine, Caller("b", prompt, tenant_salt=b"two").verify())
    assert verified(reply).prefix_cached_tokens == 0
    switched = Caller("b", prompt, tenant_salt=b"one")
    switched.epoch = 1
    assert verified(run(engine, switched.verify())[0]).prefix_cached_tokens == 16
    check_pool(engine)


def test_B125_a_rejected_branch_never_reaches_the_prefix_cache():
    """Drafted tokens fill a block; after their rejection nobody may find them."""
    engine, caller = toy_engine(), Caller("a", [1, 2, 3])
    run(engine, caller.verify([5, 6, 7, 8, 9]))
    (reply,) = run(engine, Caller("b", [1, 2, 3, 5, 6, 7, 8, 9]).verify())
    assert verified(reply).prefix_cached_tokens == 0
    # Once a call keeps them they are found.
    (reply,) = run(engine, Caller("c", [1, 2, 3, 5, 6, 7, 8, 9]).verify())
    assert verified(reply).prefix_cached_tokens == 4


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_B128_block_boundaries_with_and_without_the_prefix_cache(extra, k):
    prompt = (PROMPT * 3)[: 12 + extra]
    texts = []
    for cached in (False, True):
        engine = toy_engine(enable_prefix_caching=cached)
        run(engine, Caller("warm", prompt).verify())
        caller = Caller("a", prompt)
        for _ in range(5):
            drafts = greedy_decode(SPEC, caller.committed.tokens, k)
            drafts[-1] = (drafts[-1] + 1) % 16
            reply = verified(run(engine, caller.verify(drafts))[0])
            caller.heard(reply, k - 1)
            caller.committed.append([*drafts[:-1], reply.replacement_token_ids[k - 1]])
            check_pool(engine)
        texts.append(caller.committed.tokens[len(prompt) :])
    assert texts[0] == texts[1] == greedy_decode(SPEC, prompt, 5 * k)


def test_B127_a_draft_proposes_the_same_with_the_cache():
    warm, cold = toy_engine("draft"), toy_engine("draft", enable_prefix_caching=False)
    for tail in (5, 6):
        prompt = [1, 2, 3, 4, tail]
        ours = proposed(run(warm, Caller(f"w{tail}", prompt).propose(4))[0])
        plain = proposed(run(cold, Caller(f"c{tail}", prompt).propose(4))[0])
        assert ours.draft_token_ids == plain.draft_token_ids
    assert ours.prefix_cached_tokens == 4


def test_a_prompt_in_pieces_equals_a_prompt_in_one():
    engine, prompt = toy_engine(max_num_batched_tokens=65), PROMPT * 40
    caller = Caller("a", prompt[:90])
    (reply,) = run(engine, caller.verify(append_only=True))
    caller.heard(verified(reply))
    assert caller.cached_length == 90
    caller.committed.append(prompt[90:])
    assert opened(engine, caller) == greedy_decode(SPEC, prompt, 1)[0]
    # The same piece again, from the cache alone: no forward is needed.
    iterations = engine.load.num_iterations
    (reply,) = run(engine, Caller("b", prompt[:88]).verify(append_only=True))
    assert verified(reply).prefix_cached_tokens == 88
    assert engine.load.num_iterations == iterations
    check_pool(engine)


def test_waiting_prompts_of_equal_text_are_computed_once():
    """n choices of one prompt: the later ones find the blocks of the first."""
    engine = toy_engine(max_num_batched_tokens=65)
    callers = [Caller(str(i), PROMPT * 13) for i in range(4)]
    replies = [verified(r) for r in run(engine, *(caller.verify() for caller in callers))]
    assert sorted(reply.prefix_cached_tokens for reply in replies) == [0, 64, 64, 64]


@pytest.mark.parametrize("num_blocks", range(1, 6))
def test_B130_speculation_costs_no_prefix_hits(num_blocks):
    """An exact repeat finds every full block but the one whose last token must be computed."""
    prompt = (PROMPT * 4)[: 4 * num_blocks]
    for k in (0, 4):
        engine, caller = toy_engine(), Caller("a", prompt)
        for _ in range(3):
            reply = verified(run(engine, caller.verify([7] * k))[0])
            caller.heard(reply)
            caller.committed.append([reply.replacement_token_ids[0]])
        run(engine, Release("a"))
        again = verified(run(engine, Caller("b", prompt).verify([7] * k))[0])
        assert again.prefix_cached_tokens == 4 * (num_blocks - 1)


def test_B131_chats_of_many_turns_hit_as_often_with_speculation():
    """Drafted tokens take blocks for one round only: in a pool that just fits, turns still hit."""
    hits = []
    for k in (0, 4):
        engine, count = toy_engine(num_kv_blocks=48), 0
        history = [[i + 1, 2, 3] for i in range(4)]
        for turn in range(6):
            for i, tokens in enumerate(history):
                caller = Caller(f"{i}.{turn}", tokens)
                for _ in range(4):
                    reply = verified(run(engine, caller.verify([7] * k))[0])
                    count += reply.prefix_cached_tokens
                    caller.heard(reply)
                    caller.committed.append([reply.replacement_token_ids[0]])
                run(engine, Release(caller.session_id))
                history[i] = [*caller.committed.tokens, 5, 6]
        hits.append(count)
    assert hits[0] > 0
    assert hits[1] >= 0.95 * hits[0]


# Preemption


def test_a_younger_session_is_preempted_and_told_so():
    engine = toy_engine(num_kv_blocks=6)
    old, young = Caller("old", [1] * 11), Caller("young", [2] * 11)
    opened(engine, old)
    opened(engine, young)
    old.committed.append([3] * 3)
    assert verified(run(engine, old.verify())[0]).cached_length == 15
    assert engine.load.num_sessions == 1
    (reply,) = run(engine, young.verify())
    assert isinstance(error_of(reply), Preempted)
    assert isinstance(error_of(run(engine, young.verify())[0]), SessionNotFound)
    check_pool(engine)


def test_a_preempted_session_opens_again_with_everything():
    engine = toy_engine(num_kv_blocks=6)
    old, young = Caller("old", [1] * 11), Caller("young", [2] * 7)
    opened(engine, old)
    opened(engine, young)
    old.committed.append([3] * 6)
    run(engine, old.verify())
    run(engine, Release("old"))
    young.reopen()
    text = young.committed.tokens[7:] + [opened(engine, young)]
    assert text == greedy_decode(SPEC, [2] * 7, 2)
    check_pool(engine)


def test_priority_comes_before_age():
    engine = toy_engine(num_kv_blocks=6)
    low = Caller("low", [1] * 11)
    high = Caller("high", [2] * 11, priority=1)
    opened(engine, low)
    opened(engine, high)
    high.committed.append([3] * 3)
    assert verified(run(engine, high.verify())[0]).cached_length == 15
    assert isinstance(error_of(run(engine, low.verify())[0]), Preempted)


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_a_call_in_flight_of_a_victim_is_answered_preempted(pause_s):
    """Also when the victim came first and is in the plan already."""
    clock = Clock()
    engine = toy_engine(num_kv_blocks=6, clock=clock)
    old, young = Caller("old", [1] * 11), Caller("young", [2] * 11)
    opened(engine, old)
    opened(engine, young)
    old.committed.append([3] * 3)
    engine.submit(young.verify())
    clock.now += pause_s
    replies = {r.session_id: r for r in run(engine, old.verify())}
    assert isinstance(error_of(replies["young"]), Preempted)
    assert verified(replies["old"]).cached_length == 15
    check_pool(engine)


def test_a_newcomer_waits_for_blocks_rather_than_take_an_elders():
    clock = Clock()
    engine = toy_engine(num_kv_blocks=4, clock=clock)
    old = Caller("old", [1] * 11)
    opened(engine, old)
    newcomer = Caller("new", [2] * 11).verify()
    assert run(engine, newcomer) == []
    wait = engine.wait_s()
    assert wait is not None
    assert wait > 0
    iterations = engine.load.num_iterations
    clock.now += wait
    assert engine.step() is None
    assert engine.load.num_iterations == iterations + 1, "waiting must not look like hanging"
    (reply,) = run(engine, Release("old"))
    assert verified(reply).cached_length == 11
    check_pool(engine)


def test_call_ids_are_unique_in_these_tests():
    assert next(CALL_IDS) < 77_000_000
