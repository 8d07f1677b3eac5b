"""ngram, suffix and cascade over real gRPC: no token changes, no draft where none is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from helpers.pair import (
    DRAFT,
    TARGET,
    Generated,
    Pair,
    greedy_tokens,
    make_draft,
    make_request,
    port_of,
    prompts,
    running_pair,
)
from helpers.waiting import eventually
from specserve.config import SpeculativeMethod
from specserve.rpc import codec
from specserve.rpc.v1 import generation_pb2

SLOW_TARGET = TARGET + ",step_ms=2"
METHODS: tuple[SpeculativeMethod, ...] = ("ngram", "suffix", "cascade")
CASCADE = {"method": "cascade", "cascade_min_match_length": 3}

pytestmark = pytest.mark.slow


def proposers_of(answer: Generated) -> dict[str | None, generation_pb2.ProposerCounts]:
    """Give what each proposer did for an answer."""
    assert answer.record is not None
    return {codec.unpack_method(one.proposer): one for one in answer.record.proposers}


def check_record(answer: Generated) -> None:
    """The proposers' counts add up, and every round names one."""
    record = answer.record
    assert record is not None
    counts = list(record.proposers)
    assert record.num_spec_steps == sum(one.num_spec_steps for one in counts)
    assert record.num_draft_tokens == sum(one.num_draft_tokens for one in counts)
    accepted = sum(one.num_accepted_draft_tokens for one in counts)
    assert record.num_accepted_draft_tokens == accepted
    assert len(record.per_step_proposer) == len(record.per_step_drafted)
    for one in counts:
        steps = [
            drafted
            for drafted, proposer in zip(
                record.per_step_drafted, record.per_step_proposer, strict=True
            )
            if proposer == one.proposer
        ]
        assert (len(steps), sum(steps)) == (one.num_spec_steps, one.num_draft_tokens)


async def answers_of(
    pair: Pair, method: SpeculativeMethod, rule: str, texts: Sequence[Sequence[int]]
) -> list[Generated]:
    """Answer every prompt at K = 0 and K = 5; return the latter, compared."""
    plain, answers = [
        await asyncio.gather(
            *(
                pair.generate(
                    make_request(text, rule=rule, seed=seed, k=k, max_tokens=60, method=method)
                )
                for seed, text in enumerate(texts)
            )
        )
        for k in (0, 5)
    ]
    for one, other in zip(plain, answers, strict=True):
        assert one.token_ids == other.token_ids
        check_record(other)
        assert one.record is not None
        assert one.record.num_draft_tokens == 0
    return answers


@pytest.mark.parametrize("method", METHODS)
async def test_twin_no_proposer_changes_a_token_B005(method: SpeculativeMethod) -> None:
    """Greedy and seeded coupled: equal to target-only, token for token, and drafting took place."""
    texts = [*prompts(4, longest=12), [3, 4, 5, 6] * 5]
    draft = DRAFT if method == "cascade" else None
    async with running_pair(draft=draft, k=5, speculative={**CASCADE, "method": method}) as pair:
        greedy = await answers_of(pair, method, "greedy", texts)
        for text, answer in zip(texts, greedy, strict=True):
            assert answer.token_ids == greedy_tokens(TARGET, text, 60)
        coupled = await answers_of(pair, method, "coupled", texts)
        for answers in (greedy, coupled):
            assert sum(answer.record.num_draft_tokens for answer in answers if answer.record)
        # A greedy toy runs into a loop sooner or later, which a lookup then guesses in full.
        name = "suffix" if method == "cascade" else method
        found = [proposers_of(answer).get(name) for answer in greedy]
        assert sum(one.num_accepted_draft_tokens for one in found if one is not None) > 30
        await pair.until_idle()


async def test_twin_a_draft_that_stops_when_unsure_changes_no_token() -> None:
    """Greedy and seeded coupled equal target-only; rounds have fewer draft tokens than K."""
    method: SpeculativeMethod = "draft_model"
    config = {**CASCADE, "method": method, "draft_confidence_threshold": 0.5}
    async with running_pair(k=5, speculative=config) as pair:
        for rule in ("greedy", "coupled"):
            answers = await answers_of(pair, method, rule, [*prompts(4, longest=12)])
            records = [answer.record for answer in answers if answer.record is not None]
            drafted = {n for record in records for n in record.per_step_drafted if n}
            assert len(drafted) > 2, "the threshold must cut some guesses and leave others"
        await pair.until_idle()


async def test_a_cascade_asks_the_draft_where_no_long_match_is() -> None:
    """Both are used in one request; suffix guesses need their match, and fewer tokens are fine."""
    async with running_pair(k=5, speculative=CASCADE) as pair:
        answer = await pair.generate(make_request([9, 8, 7], max_tokens=80))
        assert answer.token_ids == greedy_tokens(TARGET, [9, 8, 7], 80)
        check_record(answer)
        found = proposers_of(answer)
        assert set(found) == {"draft_model", "suffix"}
        assert found["draft_model"].num_accepted_draft_tokens > 0
        assert found["suffix"].num_accepted_draft_tokens > 0
        await pair.until_idle()


async def test_the_draft_is_caught_up_after_suffix_rounds() -> None:
    """300 tokens of suffix rounds, then the draft: what it lacks is appended, nothing is wrong."""
    text = [*range(1, 41)] * 3
    async with running_pair(k=5, speculative={**CASCADE, "method": "draft_model"}) as pair:
        for rule in ("greedy", "coupled"):
            requests = [
                make_request(text, rule=rule, k=k, max_tokens=300, method=method)
                for k, method in ((0, None), (5, "cascade"), (5, "draft_model"))
            ]
            plain, cascade, model = await asyncio.gather(*map(pair.generate, requests))
            assert plain.token_ids == cascade.token_ids == model.token_ids
            check_record(cascade)
        await pair.until_idle()


async def test_a_draft_killed_under_a_cascade_costs_no_token() -> None:
    """The draft goes in mid-stream, and suffix guesses go on; a new one at its address is used."""
    async with running_pair(SLOW_TARGET, DRAFT, k=5, speculative=CASCADE) as pair:
        assert pair.draft is not None
        for rule in ("greedy", "coupled"):
            plain = await pair.generate(make_request(rule=rule, k=0, max_tokens=400))
            answer = Generated()
            call = pair.blocks(make_request(rule=rule, max_tokens=400))
            await pair.take(call, answer, 40)
            address = pair.draft.address
            await pair.draft.stop()
            await pair.take(call, answer, 150)
            described = pair.orchestrator.pair.describe(include_token_table=False)
            assert described.ready
            assert described.speculation_enabled
            assert "only suffix guesses are made" in described.reason
            pair.draft = await make_draft(port=port_of(address))
            pair.owned.append(pair.draft)
            await pair.finish(call, answer)
            assert answer.token_ids == plain.token_ids
            check_record(answer)
        await pair.until_idle()


async def test_a_cascade_starts_without_its_draft_ready_only_with_it() -> None:
    """Like draft_model it waits for the draft to come up once."""
    async with running_pair(draft=None, speculative=CASCADE, wait=False) as pair:
        orchestrator = pair.orchestrator.pair
        await eventually(lambda: orchestrator.vocabulary is not None, "the target is there")
        assert not orchestrator.describe(include_token_table=False).ready
        draft = await make_draft()
        pair.owned.append(draft)
        orchestrator.update_peers((pair.target.address,), (draft.address,))
        await eventually(
            lambda: orchestrator.describe(include_token_table=False).ready, "the pair is ready"
        )


async def test_each_request_chooses_its_method() -> None:
    """One deployment with a draft offers all; the record says who proposed, the metrics too."""
    text = [9, 8, 7]
    async with running_pair(k=5, speculative={"cascade_min_match_length": 3}) as pair:
        truth = greedy_tokens(TARGET, text, 80)
        for method, proposers in (
            (None, {"draft_model"}),
            ("draft_model", {"draft_model"}),
            ("ngram", {"ngram"}),
            ("suffix", {"suffix"}),
            ("cascade", {"draft_model", "suffix"}),
        ):
            answer = await pair.generate(make_request(text, max_tokens=80, method=method))
            assert answer.token_ids == truth
            assert set(proposers_of(answer)) == proposers
            check_record(answer)
        await pair.until_idle()
        drafted = pair.orchestrator.servicer._metrics.proposer_draft_tokens
        labels = {sample.labels["proposer"] for sample in drafted.collect()[0].samples}
        assert labels == {"draft_model", "ngram", "suffix"}


async def test_without_a_draft_service_only_what_needs_none_is_offered() -> None:
    """Named, with the choices, and before any other process sees the request."""
    async with running_pair(draft=None, speculative={"method": "suffix"}) as pair:
        described = pair.orchestrator.pair.describe(include_token_table=False)
        assert codec.unpack_methods(described.speculative_methods) == ("ngram", "suffix")
        assert codec.unpack_method(described.speculative_method) == "suffix"
        assert described.speculation_enabled
        assert not described.reason
        assert not described.HasField("draft")
        assert pair.orchestrator.pair.drafts is None
        for method in ("draft_model", "cascade"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pair.generate(make_request(method=method))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "speculative_method" in str(caught.value.details())
            assert "offers ngram or suffix" in str(caught.value.details())
        assert (await pair.generate(make_request(method="ngram", max_tokens=8))).record


async def test_a_clients_leaving_stops_the_reading_of_its_prompt() -> None:
    """Up to 4,000 tokens, left at once: no task is left, and the next request is served."""
    async with running_pair(draft=None, speculative={"method": "suffix"}) as pair:
        for text in prompts(4, seed=4, longest=4000):
            call = pair.blocks(make_request(text, max_tokens=100))
            await call.read()
            call.cancel()
            await asyncio.gather(call.code(), return_exceptions=True)
        await pair.until_idle()
        await eventually(
            lambda: "lookup" not in {task.get_name() for task in asyncio.all_tasks()},
            "nobody reads any more",
        )
        answer = await pair.generate(make_request(max_tokens=12))
        assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), 12)
        await pair.until_idle()


PAST = {"method": "suffix", "suffix_decoding_max_cached_requests": 8}


async def test_past_outputs_help_their_own_tenant_only() -> None:
    """The second of two equal requests is guessed from the first; another tenant's is not."""
    async with running_pair(draft=None, k=8, speculative=PAST) as pair:

        async def num_accepted(salt: bytes) -> int:
            request = make_request(rule="coupled", max_tokens=60, tenant_salt=salt)
            answer = await pair.generate(request)
            assert answer.record is not None
            tokens.add(tuple(answer.token_ids))
            return answer.record.num_accepted_draft_tokens

        tokens: set[tuple[int, ...]] = set()
        first = await num_accepted(b"one")
        assert await num_accepted(b"two") == first
        assert await num_accepted(b"") == first
        assert await num_accepted(b"one") > first + 20
        assert len(tokens) == 1


async def test_a_seeds_own_past_is_no_guess_for_it_under_standard() -> None:
    """Its uniforms would decide about their own work. Another seed is guessed from it."""
    async with running_pair(draft=None, k=8, speculative=PAST) as pair:
        first, again, other = [
            await pair.generate(make_request([9, 8], rule="standard", seed=seed, max_tokens=60))
            for seed in (1, 1, 2)
        ]
        assert again.token_ids == first.token_ids
        assert _counts(again) == _counts(first)
        assert len(pair.orchestrator.servicer._proposers.past.of(b"", (1, 0))) == 0
        assert len(pair.orchestrator.servicer._proposers.past.of(b"", (3, 0))) == 1
        assert other.token_ids != first.token_ids


def _counts(answer: Generated) -> tuple[int, int]:
    assert answer.record is not None
    return answer.record.num_draft_tokens, answer.record.num_accepted_draft_tokens


async def test_past_outputs_are_bounded_and_off_by_default() -> None:
    """Requests that ended are kept, those that were given up are not."""
    async with running_pair(draft=None, speculative=PAST) as pair:
        past = pair.orchestrator.servicer._proposers.past
        call = pair.blocks(make_request(max_tokens=4000))
        await pair.take(call, Generated(), 3)
        call.cancel()
        await pair.until_idle()
        assert past.num_outputs == 0
        for _ in range(12):
            await pair.generate(make_request(max_tokens=10))
        assert 4 <= past.num_outputs <= 8
    async with running_pair(draft=None, speculative={"method": "suffix"}) as pair:
        await pair.generate(make_request(max_tokens=10))
        assert pair.orchestrator.servicer._proposers.past.num_outputs == 0
