"""Target, draft and orchestrator over real gRPC: speculation changes no token and leaks nothing."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from helpers.pair import (
    DRAFT,
    TARGET,
    Generated,
    greedy_tokens,
    is_ready,
    make_request,
    prompts,
    running_pair,
)
from helpers.waiting import eventually
from specserve.model.toy import ToySpec, toy_logits
from specserve.rpc import codec
from specserve.rpc.v1 import generation_pb2

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
KS = (0, 1, 2, 3, 5, 8)


@pytest.mark.slow
async def test_greedy_tokens_do_not_depend_on_k_B005() -> None:
    """Whatever K is, the tokens are those of the target's own table, and drafting took place."""
    async with running_pair(k=8) as pair:
        for prompt in prompts(4):
            truth = greedy_tokens(TARGET, prompt, 40)
            answers = await asyncio.gather(
                *(pair.generate(make_request(prompt, k=k, max_tokens=40)) for k in KS)
            )
            for k, answer in zip(KS, answers, strict=True):
                assert answer.token_ids == truth, f"K = {k}"
                assert answer.finish_reason == LENGTH
                assert answer.record is not None
                assert (answer.record.num_draft_tokens > 0) == (k > 0)


@pytest.mark.slow
async def test_seeded_coupled_tokens_do_not_depend_on_k_B005() -> None:
    """The coupled rule gives equal tokens for equal seeds, speculation on, off and at any K."""
    async with running_pair(k=8) as pair:
        for seed, prompt in enumerate(prompts(4)):
            answers = await asyncio.gather(
                *(
                    pair.generate(
                        make_request(prompt, rule="coupled", seed=seed, k=k, max_tokens=40)
                    )
                    for k in KS
                )
            )
            assert len({tuple(answer.token_ids) for answer in answers}) == 1
            assert answers[-1].record is not None
            assert answers[-1].record.num_accepted_draft_tokens > 0


@pytest.mark.slow
async def test_a_seed_repeats_its_tokens_whatever_the_load_B008() -> None:
    """20 times the same seed at temperature 1.5, beside 0, 1 and 16 other requests: one text."""
    async with running_pair() as pair:
        texts = []
        for number in range(20):
            load = [
                pair.generate(make_request(prompt, rule="standard", seed=100 * number + i))
                for i, prompt in enumerate(prompts((0, 1, 16)[number % 3], seed=number))
            ]
            request = make_request(rule="coupled", seed=42, temperature=1.5)
            answer, *_ = await asyncio.gather(pair.generate(request), *load)
            assert answer.record is not None
            assert answer.record.num_draft_tokens > 0
            texts.append(tuple(answer.token_ids))
        assert len(set(texts)) == 1


@pytest.mark.slow
async def test_concurrent_streams_equal_their_solo_runs_and_leave_no_kv_B058_B074_B116() -> None:
    """64 streams of mixed lengths, some with logprobs: each as if alone; then no block is held."""
    requests = [
        make_request(
            prompt,
            rule=("greedy", "coupled")[i % 2],
            seed=i,
            k=(None, 0, 1, 3)[i % 4],
            max_tokens=1 + 5 * i % 37,
            num_logprobs=2 if i % 3 == 0 else None,
        )
        for i, prompt in enumerate(prompts(64, longest=300))
    ]
    async with running_pair() as pair:
        together = await asyncio.gather(*(pair.generate(request) for request in requests))
        await pair.until_idle()
        for request, answer in zip(requests, together, strict=True):
            if request.sampling.temperature == 0:
                prompt = codec.unpack_ids(request.prompt_token_ids, "prompt")
                assert answer.token_ids == greedy_tokens(TARGET, prompt, request.max_tokens)
            else:
                alone = await pair.generate(request)
                assert answer.token_ids == alone.token_ids
                assert answer.text == alone.text
            wants_logprobs = request.sampling.num_logprobs_plus_one > 0
            assert len(answer.logprobs) == request.max_tokens * wants_logprobs
        await pair.until_idle()


async def test_logprobs_are_those_of_their_own_rows_B055_B056() -> None:
    """Accepted, recovered, bonus and plain tokens each carry the target's own log-probability."""
    spec = ToySpec.parse(TARGET)
    async with running_pair() as pair:
        on = await pair.generate(make_request(num_logprobs=2, max_tokens=48))
        off = await pair.generate(make_request(num_logprobs=2, max_tokens=48, k=0))
    assert len(on.logprobs) == len(on.token_ids) == 48
    assert set(on.origins) >= {
        generation_pb2.TOKEN_ORIGIN_ACCEPTED,
        generation_pb2.TOKEN_ORIGIN_RECOVERED,
        generation_pb2.TOKEN_ORIGIN_BONUS,
    }
    tokens = [5, 6, 7, *on.token_ids]
    for index, (ours, plain) in enumerate(zip(on.logprobs, off.logprobs, strict=True)):
        logits = toy_logits(spec, tokens[: 3 + index]).astype(np.float64)
        truth = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert ours.logprob == pytest.approx(truth[tokens[3 + index]], abs=1e-5)
        assert ours.logprob == pytest.approx(plain.logprob, abs=1e-6)
        top = codec.unpack_ids(ours.top_token_ids, "top")
        assert list(top) == np.argsort(-truth)[:2].tolist()
        assert ours.top_token_ids == plain.top_token_ids


async def test_logprobs_without_alternatives_name_the_chosen_token_only_B055() -> None:
    """num_logprobs 0 gives one entry per token and no top list."""
    async with running_pair() as pair:
        answer = await pair.generate(make_request(num_logprobs=0, max_tokens=12))
    assert len(answer.logprobs) == 12
    assert all(not entry.top_token_ids for entry in answer.logprobs)


async def test_choices_of_one_seed_differ_and_repeat() -> None:
    """Two choices never share randomness; one choice repeats itself."""
    async with running_pair() as pair:
        first = await pair.generate(make_request(rule="coupled", choice=0))
        second = await pair.generate(make_request(rule="coupled", choice=1))
        again = await pair.generate(make_request(rule="coupled", choice=0))
    assert first.token_ids != second.token_ids
    assert first.token_ids == again.token_ids


@pytest.mark.slow
async def test_first_token_of_the_standard_rule_follows_the_target_B020() -> None:
    """400 first tokens and 400 second ones (accepted or recovered) fit p: chi-square, odds 1e-6."""
    target, draft = "toy:vocab_size=6,seed=3,sharpness=1", "toy:vocab_size=6,seed=3,noise=1"
    spec = ToySpec.parse(target)
    async with running_pair(target, draft, k=2) as pair:
        answers = await asyncio.gather(
            *(
                pair.generate(make_request([1, 2], rule="standard", seed=seed, max_tokens=4))
                for seed in range(400)
            )
        )
    assert any(answer.record and answer.record.num_accepted_draft_tokens for answer in answers)

    def law(context: list[int]) -> np.ndarray:
        weights = np.exp(toy_logits(spec, context).astype(np.float64))
        return weights / weights.sum()

    first = law([1, 2])
    second = sum(first[a] * law([2, a]) for a in range(6))
    for position, expected in ((0, first), (1, second)):
        counts = Counter(answer.token_ids[position] for answer in answers)
        observed = np.array([counts[token] for token in range(6)])
        statistic = float(((observed - 400 * expected) ** 2 / (400 * expected)).sum())
        # The 1 - 5e-7 quantile of chi-square with 5 degrees of freedom is 37.5.
        assert statistic < 37.5, (position, observed, 400 * expected)


async def test_always_wrong_draft_commits_one_token_a_round_B115() -> None:
    """K = 5 and nothing accepted: every round commits exactly one token, counted as recovered."""
    # Another table altogether: greedy agreement of 48 tokens is left to chance, so count instead.
    async with running_pair(draft="toy:vocab_size=48,seed=7,noise=1000,noise_seed=9", k=5) as pair:
        answer = await pair.generate(make_request(max_tokens=24))
    record = answer.record
    assert record is not None
    assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), 24)
    assert record.num_plain_tokens + record.num_recovered_tokens + record.num_bonus_tokens == (
        record.num_spec_steps + record.num_plain_steps
    )
    assert len(answer.token_ids) == (
        record.num_spec_steps + record.num_plain_steps + record.num_accepted_draft_tokens
    )


async def test_draft_equal_to_the_target_is_accepted_whole_B124_B136() -> None:
    """With equal weights every draft token is accepted, round after round, K tokens each."""
    async with running_pair(draft=TARGET, k=4) as pair:
        answer = await pair.generate(make_request(max_tokens=41))
    record = answer.record
    assert record is not None
    # How many plain rounds come before the draft has read the prompt is a matter of time.
    assert record.num_spec_steps >= 5
    assert record.per_step_accepted == record.per_step_drafted
    assert set(record.per_step_drafted[:-1]) == {4}
    assert record.num_bonus_tokens == record.num_spec_steps
    assert record.num_recovered_tokens == 0
    assert record.accepted_per_position[0] == record.num_spec_steps


async def test_one_token_needs_no_draft_call_B052() -> None:
    """max_tokens 1 and 2 never call the draft; K and K + 1 stay within the limit."""
    async with running_pair(k=4) as pair:
        assert pair.draft is not None
        for max_tokens in (1, 2):
            answer = await pair.generate(make_request(max_tokens=max_tokens))
            assert len(answer.token_ids) == max_tokens
            assert pair.draft.replica.num_sessions == 0
            assert pair.draft.replica.device.load.num_iterations == 0
        for max_tokens in (4, 5):
            answer = await pair.generate(make_request(max_tokens=max_tokens))
            assert len(answer.token_ids) == max_tokens
            assert answer.finish_reason == LENGTH


@pytest.mark.parametrize("k", [1, 4, 5])
async def test_context_end_is_reached_exactly_B082_B083_B086_B133(k: int) -> None:
    """A sequence ends at the context's last token with `length`, whatever the prompt's length."""
    async with running_pair(
        k=k, target_fields={"max_model_len": 24}, draft_fields={"max_model_len": 24}
    ) as pair:
        for length in (16, 19, 20, 21, 22, 23):
            prompt = [1 + i % 40 for i in range(length)]
            answer = await pair.generate(make_request(prompt, max_tokens=100))
            assert answer.token_ids == greedy_tokens(TARGET, prompt, 24 - length)
            assert answer.finish_reason == LENGTH
        await pair.until_idle()


async def test_prompt_that_fills_the_context_is_refused_with_both_numbers_B086() -> None:
    """limit and limit + 1 tokens are the client's fault, and are told so."""
    async with running_pair(target_fields={"max_model_len": 24}) as pair:
        for length in (24, 25):
            with pytest.raises(Exception, match=rf"{length} tokens .* context of 24 tokens"):
                await pair.generate(make_request([1] * length))


@pytest.mark.parametrize("length", [3, 5, 15, 16, 20])
async def test_draft_with_a_shorter_context_is_never_called_beyond_it_B085(length: int) -> None:
    """Past the draft's own limit the request goes on target-only."""
    prompt = [1 + i % 40 for i in range(length)]
    async with running_pair(draft_fields={"max_model_len": 16}) as pair:
        answer = await pair.generate(make_request(prompt, max_tokens=30))
        assert answer.token_ids == greedy_tokens(TARGET, prompt, 30)
        assert answer.record is not None
        assert answer.record.num_target_reopens == 0
        assert (answer.record.num_draft_tokens > 0) == (length < 14)


async def test_request_larger_than_the_pool_ends_with_length_B080() -> None:
    """A pool of 4 blocks holds 64 tokens: the request ends there and the service lives on."""
    async with running_pair(target_fields={"num_kv_blocks": 4}) as pair:
        answer = await pair.generate(make_request(max_tokens=500))
        assert len(answer.token_ids) == 61
        assert answer.finish_reason == LENGTH
        assert len((await pair.generate(make_request(max_tokens=5))).token_ids) == 5


async def test_eos_inside_a_block_ends_the_text_there_B046_B053() -> None:
    """EOS stops at its place in the block; ignored, the text runs to max_tokens, drafting on."""
    target, draft = TARGET + ",eos_bias=3", DRAFT + ",eos_bias=3"
    async with running_pair(target, draft) as pair:
        for prompt in prompts(8):
            truth = greedy_tokens(target, prompt, 60)
            answer = await pair.generate(make_request(prompt, max_tokens=60, ignore_eos=False))
            if 0 in truth:
                assert answer.token_ids == truth[: truth.index(0) + 1]
                assert answer.finish_reason == STOP
            ignored = await pair.generate(make_request(prompt, max_tokens=60))
            assert ignored.token_ids == truth
            assert ignored.finish_reason == LENGTH


async def test_stop_string_cuts_on_as_off_B040_B044() -> None:
    """A stop string ends ids, text and logprobs at one place with speculation on and off."""
    async with running_pair(draft=TARGET) as pair:
        whole = await pair.generate(make_request(max_tokens=40))
        for at in range(6, 12):
            stop = whole.text[at : at + 3]
            on = await pair.generate(make_request(max_tokens=40, stop=[stop], num_logprobs=2))
            off = await pair.generate(make_request(max_tokens=40, stop=[stop], num_logprobs=2, k=0))
            assert on.token_ids == off.token_ids
            assert on.text == off.text == whole.text[: whole.text.index(stop)]
            assert len(on.logprobs) == len(on.origins) == len(on.token_ids)
            assert on.finish_reason == STOP


async def test_prefix_cache_changes_no_token_and_is_counted_B125() -> None:
    """A repeated prompt is found in the target's cache, but for its last block."""
    prompt = [1 + i % 40 for i in range(70)]
    async with running_pair() as pair:
        first = await pair.generate(make_request(prompt, rule="coupled"))
        second = await pair.generate(make_request(prompt, rule="coupled"))
    assert first.token_ids == second.token_ids
    assert first.record is not None
    assert second.record is not None
    assert first.record.cached_prompt_tokens == 0
    assert second.record.cached_prompt_tokens == 64


async def test_carried_over_prefix_continues_the_same_text() -> None:
    """Another orchestrator's committed tokens are counted, not repeated, and the rest is equal."""
    async with running_pair() as pair:
        for rule in ("greedy", "coupled"):
            whole = await pair.generate(make_request(rule=rule, max_tokens=30))
            rest = await pair.generate(
                make_request(rule=rule, max_tokens=30, committed=whole.token_ids[:11])
            )
            assert rest.token_ids == whole.token_ids[11:]
            assert rest.text == whole.text[len(whole.text) - len(rest.text) :]


async def test_request_sent_again_never_meets_its_older_session() -> None:
    """The same request id with another committed prefix gets its own tokens, not stored replies.

    A target that still holds the first attempt's session must not take the second for a repeat.
    """
    async with running_pair() as pair:
        request = make_request(max_tokens=20)
        first = Generated()
        call = pair.blocks(request)
        await pair.take(call, first, 1)
        again = make_request(max_tokens=20, committed=first.token_ids)
        again.request_id = request.request_id
        answer = await pair.generate(again)
        call.cancel()
        assert (
            first.token_ids + answer.token_ids
            == greedy_tokens(TARGET, (5, 6, 7), 20)[: len(first.token_ids + answer.token_ids)]
        )
        assert len(first.token_ids + answer.token_ids) == 20


async def test_non_finite_row_fails_its_own_request_only() -> None:
    """A row of NaN ends one request with a message that names it; its neighbours go on."""
    truth = greedy_tokens(TARGET, (5, 6, 7), 12)
    poisoned = f"{TARGET},nan_token={truth[8]}"
    other = next(
        prompt
        for prompt in prompts(200)
        if truth[8] not in greedy_tokens(TARGET, prompt, 12) + prompt
    )
    async with running_pair(poisoned) as pair:
        bad, good = await asyncio.gather(
            pair.generate(make_request(max_tokens=30)),
            pair.generate(make_request(other, max_tokens=12)),
            return_exceptions=True,
        )
        assert isinstance(good, Generated)
        assert good.token_ids == greedy_tokens(TARGET, other, 12)
        assert "no usable logits" in str(bad)
        await pair.until_idle()


async def test_unlike_vocabulary_is_refused_and_served_target_only_B091_B092_B095() -> None:
    """The first differing id is named, the pair is not ready, and requests are answered still."""
    async with running_pair(draft="toy:vocab_size=40,seed=7", wait=False) as pair:

        def described() -> generation_pb2.GetPairResponse:
            return pair.orchestrator.pair.describe(include_token_table=False)

        await eventually(lambda: "token id 40" in described().reason, "the draft is refused")
        assert not described().ready
        assert not described().speculation_enabled
        answer = await pair.generate(make_request())
        assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), 32)
        assert answer.record is not None
        assert answer.record.num_draft_tokens == 0


async def test_k_above_the_configured_is_refused_by_name() -> None:
    """K is the operator's to limit; the field is named."""
    async with running_pair(k=4) as pair:
        with pytest.raises(Exception, match="num_speculative_tokens: 5, at most the configured 4"):
            await pair.generate(make_request(k=5))


async def test_tiny_pool_preempts_and_every_stream_ends_right_B079() -> None:
    """Blocks for two of six sessions: preempted ones are opened again, with the same tokens."""
    async with running_pair(target_fields={"num_kv_blocks": 10}) as pair:
        wanted = list(prompts(6, longest=20))
        answers = await asyncio.gather(
            *(pair.generate(make_request(prompt, max_tokens=50)) for prompt in wanted)
        )
        for prompt, answer in zip(wanted, answers, strict=True):
            assert answer.token_ids == greedy_tokens(TARGET, prompt, 50)
        await pair.until_idle()


async def test_stopped_orchestrator_frees_what_it_held() -> None:
    """Stopping in mid-stream releases both sessions at once, not when their leases run out."""
    async with running_pair(TARGET + ",step_ms=5") as pair:
        call = pair.blocks(make_request(max_tokens=4000))
        await pair.take(call, Generated(), 5)
        await pair.orchestrator.stop()
        await pair.until_idle(within_s=3.0)


async def test_ready_once_both_are_loaded() -> None:
    """A pair that fits is ready and gives no reason."""
    async with running_pair() as pair:
        assert is_ready(pair.orchestrator)
        assert pair.orchestrator.pair.describe(include_token_table=False).reason == ""
