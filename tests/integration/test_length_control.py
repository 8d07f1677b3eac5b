"""K chosen, switched and caught up in running requests, over real gRPC."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Sequence

import grpc
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from helpers.pair import (
    DRAFT,
    TARGET,
    Generated,
    Pair,
    greedy_tokens,
    make_request,
    running_pair,
)
from helpers.waiting import eventually
from specserve.config import OrchestratorConfig, SpeculativeConfig
from specserve.orchestrator.server import RunningOrchestrator, start_orchestrator
from specserve.rpc import codec
from specserve.rpc.v1 import admin_pb2, admin_pb2_grpc, generation_pb2
from specserve.speculation.length_choice import Choice, Reason, SpeculationMode

PROMPT = (5, 6, 7)
SLOW_TARGET = TARGET + ",step_ms=2"
WRONG_DRAFT = "toy:vocab_size=48,seed=7,noise=1000,noise_seed=9"
ACCEPTED = generation_pb2.TOKEN_ORIGIN_ACCEPTED
PLAIN = generation_pb2.TOKEN_ORIGIN_PLAIN
AUTO = {"num_speculative_tokens_schedule": "auto"}


def metrics_of(orchestrator: RunningOrchestrator) -> dict[str, float]:
    """Scrape an orchestrator: {sample with its labels: value}."""
    text = generate_latest(orchestrator.registry).decode()
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def rounds_by_reason(orchestrator: RunningOrchestrator) -> Counter[str]:
    prefix = "specserve_orchestrator_num_rounds_by_reason_total,reason="
    return Counter(
        {
            name.removeprefix(prefix): int(value)
            for name, value in metrics_of(orchestrator).items()
            if name.startswith(prefix)
        }
    )


def follow(pair: Pair, ks: Sequence[int], num_steps: int = 3) -> list[int]:
    """Have the control choose these K, over and over, in place of the best; returns what it did."""
    done: list[int] = []
    schedule = itertools.cycle(ks)

    def choose(controller, load, max_k, most, now, *, is_first, is_ahead):
        done.append(next(schedule))
        return Choice(done[-1], Reason.BEST, num_steps)

    pair.orchestrator.length.pool("draft_model").choose = choose  # type: ignore[method-assign]
    return done


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled", "standard"])
async def test_k_that_changes_every_round_changes_no_token(rule: str) -> None:
    """K = 0, 4, 2, 0, ... in mid-request: the target's own tokens, its law for `standard`.

    Greedy and coupled text is that of a run without a draft. For `standard`, with a draft equal to
    the target every token must be accepted whatever K was before it.
    """
    ks = (4, 0, 2, 0, 0, 4, 1, 3, 0)
    draft = TARGET if rule == "standard" else DRAFT
    async with running_pair(draft=draft, speculative=AUTO) as pair:
        done = follow(pair, ks)
        answer = await pair.generate(make_request(rule=rule, max_tokens=160, seed=11))
        plain = await pair.generate(make_request(rule=rule, max_tokens=160, seed=11, k=0))
        await pair.until_idle()
    assert len(done) > 20
    assert answer.record is not None
    assert set(answer.record.per_step_drafted) >= {1, 2, 3, 4}
    assert PLAIN in answer.origins
    if rule == "standard":
        assert answer.record.per_step_accepted == answer.record.per_step_drafted
    else:
        assert answer.token_ids == plain.token_ids


@pytest.mark.slow
async def test_draft_is_caught_up_before_k_returns_and_accepts_as_before_B142() -> None:
    """A draft equal to the target: after a hundred tokens at K = 0 not one token is rejected."""
    async with running_pair(SLOW_TARGET, draft=TARGET, speculative=AUTO) as pair:
        ks = [4] * 5 + [0] * 4 + [4] * 5
        done = follow(pair, ks, num_steps=25)
        answer = await pair.generate(make_request(max_tokens=300))
        assert pair.draft is not None
        reasons = rounds_by_reason(pair.orchestrator)
    record = answer.record
    assert record is not None
    assert answer.token_ids == greedy_tokens(TARGET, PROMPT, 300)
    assert record.num_plain_tokens >= 100
    assert record.num_recovered_tokens == 0
    assert record.per_step_accepted == record.per_step_drafted
    assert set(record.per_step_drafted[:-1]) == {4}
    # While the draft caught up the target went on by itself, for a few tokens only.
    assert 1 <= reasons[Reason.CATCH_UP] <= 3 * 8
    assert len(done) < 60


@pytest.mark.slow
async def test_switch_reaches_running_requests_and_is_seen_everywhere() -> None:
    """off: no draft token from the next round on; on: drafting again, in the same stream."""
    async with (
        running_pair(SLOW_TARGET, draft=TARGET, num_decode_steps=8) as pair,
        grpc.aio.insecure_channel(pair.orchestrator.address) as channel,
    ):
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        answer = Generated()
        call = pair.blocks(make_request(max_tokens=2000))
        await pair.take(call, answer, 30)
        off = await admin.SetSpeculation(_set(SpeculationMode.OFF))
        served = await pair.stub.GetPair(generation_pb2.GetPairRequest())
        status = await pair.stub.GetStatus(generation_pb2.GetStatusRequest())
        seen = metrics_of(pair.orchestrator)
        await pair.take(call, answer, len(answer.token_ids) + 6)
        start = len(answer.token_ids)
        await pair.take(call, answer, start + 60)
        assert set(answer.origins[start:]) == {PLAIN}
        on = await admin.SetSpeculation(_set(SpeculationMode.ON))
        start = len(answer.token_ids)
        while ACCEPTED not in answer.origins[start:]:
            await pair.take(call, answer, len(answer.token_ids) + 1)
            assert len(answer.token_ids) < start + 200
        call.cancel()
        tokens = greedy_tokens(TARGET, PROMPT, len(answer.token_ids))
        assert answer.token_ids == tokens
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin.SetSpeculation(admin_pb2.SetSpeculationRequest())
        state = await admin.GetSpeculation(admin_pb2.GetSpeculationRequest())

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert codec.unpack_mode(off.mode) is SpeculationMode.OFF
    assert codec.unpack_mode(off.configured_mode) is SpeculationMode.ON
    assert off.num_running == 1
    assert codec.unpack_mode(on.mode) is SpeculationMode.ON
    assert codec.unpack_mode(status.speculation_mode) is SpeculationMode.OFF
    assert codec.unpack_mode(served.speculation_mode) is SpeculationMode.OFF
    assert not served.speculation_enabled
    assert served.ready
    assert "switched it off" in served.reason
    assert seen["specserve_orchestrator_speculation_enabled"] == 0
    assert seen["specserve_orchestrator_speculation_mode,mode=off"] == 1
    assert seen["specserve_orchestrator_speculation_mode,mode=on"] == 0
    # What was learned is there for people.
    assert len(state.estimates) == 5
    assert all(one.seconds > 0 and one.num_tokens >= 1 for one in state.estimates)


def _set(mode: SpeculationMode) -> admin_pb2.SetSpeculationRequest:
    return admin_pb2.SetSpeculationRequest(mode=codec.pack_mode(mode))


@pytest.mark.slow
async def test_auto_leaves_an_always_wrong_draft_and_keeps_a_perfect_one() -> None:
    """Measured, not configured: with nothing accepted hardly a round drafts, with all nearly every
    one does; the text is the target's either way."""
    shares = {}
    for name, draft in (("wrong", WRONG_DRAFT), ("perfect", TARGET)):
        target = TARGET + ",step_ms=10"
        async with running_pair(target, draft + ",step_ms=1", speculative=AUTO) as pair:
            for _ in range(2):  # the first one warms up
                answer = await pair.generate(make_request(max_tokens=200))
            assert answer.token_ids == greedy_tokens(TARGET, PROMPT, 200)
            assert answer.record is not None
            rounds = answer.record.num_spec_steps + answer.record.num_plain_steps
            shares[name] = answer.record.num_spec_steps / rounds
            reasons = rounds_by_reason(pair.orchestrator)
            assert set(reasons) <= set(Reason)
            assert reasons[Reason.BEST] > 50
    assert shares["wrong"] < 0.1
    assert shares["perfect"] > 0.7


async def test_every_one_of_five_equal_requests_drafts_B145() -> None:
    """B145: not the first request alone; the drafted counter rises with each."""
    async with running_pair(draft=TARGET) as pair:
        drafted = []
        for _ in range(5):
            await pair.generate(make_request(max_tokens=24))
            await eventually(lambda: pair.orchestrator.servicer.num_running == 0, "counted")
            drafted.append(
                metrics_of(pair.orchestrator)["specserve_orchestrator_num_draft_tokens_total"]
            )
    assert drafted[0] > 0
    assert all(later > earlier for earlier, later in itertools.pairwise(drafted))


async def test_table_by_batch_size_overrides_k() -> None:
    """One session gets K = 2, as the table says; a request that allows less gets less."""
    table = {"num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 64, 0]]}
    async with running_pair(draft=TARGET, k=4, speculative=table) as pair:
        answer = await pair.generate(make_request(max_tokens=30))
        capped = await pair.generate(make_request(max_tokens=30, k=1))
        reasons = rounds_by_reason(pair.orchestrator)
    assert answer.record is not None
    assert capped.record is not None
    assert set(answer.record.per_step_drafted[:-1]) == {2}
    assert set(capped.record.per_step_drafted) == {1}
    assert reasons[Reason.BATCH_SIZE] > 5
    assert reasons[Reason.STATIC] == 0


async def test_draft_address_without_speculation_warns_and_shows_a_0_gauge_B146(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B146: a draft that nobody will ask is said at the start, and speculation_enabled is 0."""
    config = OrchestratorConfig(
        speculative=SpeculativeConfig(num_speculative_tokens=0),
        target_addresses=("127.0.0.1:1",),
        draft_addresses=("127.0.0.1:2",),
    )
    with caplog.at_level(logging.WARNING):
        orchestrator = await start_orchestrator(config)
    try:
        gauges = metrics_of(orchestrator)
        async with grpc.aio.insecure_channel(orchestrator.address) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin.SetSpeculation(_set(SpeculationMode.ON))
            state = await admin.SetSpeculation(_set(SpeculationMode.OFF))
    finally:
        await orchestrator.stop()

    assert "no draft will be asked" in caplog.text
    assert gauges["specserve_orchestrator_speculation_enabled"] == 0
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "started without speculation" in str(refused.value.details())
    assert codec.unpack_mode(state.mode) is SpeculationMode.OFF


async def test_counters_add_up_to_what_was_emitted_B134() -> None:
    """B134: a text cut within an accepted block counts its emitted tokens alone, everywhere.

    A perfect draft with K = 5 and a stop token at each possible place of a block.
    """
    text = greedy_tokens(TARGET, PROMPT, 40)
    async with running_pair(draft=TARGET, k=5) as pair:
        usage = 0
        for place in range(12, 18):
            first = text.index(text[place])
            answer = await pair.generate(
                make_request(max_tokens=40, stop_token_ids=[text[place]], k=5)
            )
            record = answer.record
            assert record is not None
            assert answer.token_ids == text[: first + 1]
            assert len(answer.origins) == len(answer.token_ids)
            assert len(answer.token_ids) == (
                record.num_accepted_draft_tokens
                + record.num_recovered_tokens
                + record.num_bonus_tokens
                + record.num_plain_tokens
            )
            usage += len(answer.token_ids)
        await eventually(lambda: pair.orchestrator.servicer.num_running == 0, "counted")
        counted = metrics_of(pair.orchestrator)
    kinds = ("accepted", "recovered", "bonus", "plain")
    emitted = sum(counted[f"specserve_orchestrator_num_{kind}_tokens_total"] for kind in kinds)
    assert emitted == usage


async def test_queries_over_totals_give_sane_rates_and_no_series_is_named_created_B137() -> None:
    """B137: a scraper that matches by prefix finds counters alone, and acceptance is in [0, 1]."""
    async with running_pair() as pair:
        await pair.generate(make_request(max_tokens=60))
        await eventually(lambda: pair.orchestrator.servicer.num_running == 0, "counted")
        samples = metrics_of(pair.orchestrator)
    prefix = "specserve_orchestrator_num_"
    drafted = [v for name, v in samples.items() if name.startswith(prefix + "draft_tokens")]
    accepted = [v for name, v in samples.items() if name.startswith(prefix + "accepted_tokens_t")]
    assert len(drafted) == len(accepted) == 1
    assert 0 < accepted[0] / drafted[0] <= 1
    assert 1 <= 1 + accepted[0] / samples[prefix + "drafts_total"] <= 5
    assert not [name for name in samples if "_created" in name]


@pytest.mark.slow
async def test_queue_gauge_returns_to_0_when_waiting_clients_leave_B140() -> None:
    """B140: a hundred clients that give up while queued are not counted as waiting any more."""
    async with running_pair(SLOW_TARGET, max_num_requests=1) as pair:
        running = pair.blocks(make_request(max_tokens=3000))
        await pair.take(running, Generated(), 1)
        queued = [pair.blocks(make_request(max_tokens=4)) for _ in range(100)]
        reading = [asyncio.ensure_future(call.read()) for call in queued]
        servicer = pair.orchestrator.servicer
        await eventually(lambda: servicer.num_waiting == 100, "all wait")
        for call in queued:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await eventually(lambda: servicer.num_waiting == 0, "none waits")
        status = await pair.stub.GetStatus(generation_pb2.GetStatusRequest())
        assert status.num_waiting == 0
        assert status.num_running == 1
        running.cancel()
        await pair.until_idle()


@pytest.mark.slow
async def test_series_do_not_grow_with_tenants_requests_or_replicas_B139() -> None:
    """B139: what is exported has labels of fixed sets alone; 80 tenants add no series."""
    async with running_pair(speculative=AUTO) as pair:
        sizes = []
        for number in range(80):
            await pair.generate(make_request(max_tokens=8, tenant_salt=b"%d" % number))
            if number in (9, 79):
                await eventually(lambda: pair.orchestrator.servicer.num_running == 0, "counted")
                sizes.append(len(metrics_of(pair.orchestrator)))
    # Only K, a reason or a position that had not come up before may add one.
    assert sizes[1] <= sizes[0] + 8


@pytest.mark.parametrize("method", ["draft_model", "cascade"])
async def test_a_round_waits_for_a_draft_that_reads_the_prompt_where_that_is_asked(method: str):
    """However short a request and slow its draft: it drafts. Nobody waits by default."""
    speculative = {"method": method}
    async with running_pair(
        draft=f"{DRAFT},step_ms=150", speculative=speculative, draft_catch_up_timeout_s=30.0
    ) as pair:
        answer = await pair.generate(make_request([5, 6, 7] * 200, max_tokens=8))
    assert answer.record is not None
    assert answer.record.num_draft_tokens > 0
    assert OrchestratorConfig().draft_catch_up_timeout_s == 0
