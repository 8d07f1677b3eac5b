"""What breaks between the services, and what the client sees of it: nothing but a pause."""

from __future__ import annotations

import asyncio
import random

import grpc
import numpy as np
import pytest

from helpers.pair import (
    DRAFT,
    TARGET,
    Generated,
    greedy_tokens,
    is_idle,
    make_draft,
    make_request,
    make_target,
    port_of,
    running_pair,
)
from helpers.proxy import proxy_to
from helpers.scripted import Script, proposal, scripted_draft
from helpers.waiting import eventually
from specserve.errors import CapacityExhausted, SpecServeError
from specserve.rpc import link, status
from specserve.rpc.v1 import draft_pb2, generation_pb2

PROMPT = (5, 6, 7)
SLOW_TARGET = TARGET + ",step_ms=3"
INT32_MAX = 2**31 - 1


@pytest.mark.slow
async def test_lost_draft_leaves_the_stream_running_B149() -> None:
    """A draft that stops in mid-stream costs no token and no failure; the rest is target-only."""
    async with running_pair(SLOW_TARGET, draft_timeout_s=1.0) as pair:
        answer = Generated()
        call = pair.blocks(make_request(max_tokens=120))
        await pair.take(call, answer, 20)
        assert pair.draft is not None
        await pair.draft.stop()
        await pair.finish(call, answer)
        assert answer.token_ids == greedy_tokens(TARGET, PROMPT, 120)
        assert answer.record is not None
        assert answer.record.num_draft_tokens > 0
        assert answer.record.num_plain_tokens > 20
        assert answer.record.num_target_reopens == 0
        await eventually(lambda: is_idle(pair.target), "the target is idle")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_draft_that_comes_back_is_used_again(rule: str) -> None:
    """A draft restarted on its address takes the live stream up again, by catching up."""
    async with running_pair(SLOW_TARGET) as pair:
        answer = Generated()
        call = pair.blocks(make_request(rule=rule, max_tokens=3000))
        await pair.take(call, answer, 10)
        assert pair.draft is not None
        await pair.draft.stop()
        draft = await make_draft(port=port_of(pair.draft.address))
        pair.owned.append(draft)
        while draft.replica.num_sessions == 0:
            await pair.take(call, answer, len(answer.token_ids) + 1)
        seen = len(answer.token_ids) + 1
        while generation_pb2.TOKEN_ORIGIN_ACCEPTED not in answer.origins[seen:]:
            await pair.take(call, answer, len(answer.token_ids) + 1)
        call.cancel()
        plain = await pair.generate(make_request(rule=rule, max_tokens=len(answer.token_ids), k=0))
        assert answer.token_ids == plain.token_ids
        await eventually(lambda: is_idle(draft), "the new draft is idle")


@pytest.mark.slow
async def test_late_proposals_make_target_only_rounds_and_are_counted_B077() -> None:
    """A draft slower than its deadline costs no token; its late replies are dropped and counted."""
    draft = DRAFT + ",step_ms=40"
    async with running_pair(SLOW_TARGET, draft, k=3, draft_timeout_s=0.02) as pair:
        answer = await pair.generate(make_request(max_tokens=100))
        assert answer.token_ids == greedy_tokens(TARGET, PROMPT, 100)
        assert answer.record is not None
        assert answer.record.num_late_proposals >= 1
        assert answer.record.num_draft_tokens == 0
        # The client is gone while a proposal is still being made: its reply finds nobody.
        await pair.until_idle()
        assert (await pair.generate(make_request(max_tokens=3))).token_ids == answer.token_ids[:3]


def _invalid_ids(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
    wrong = (-1, INT32_MAX, 48, -INT32_MAX)[number % 4]
    tokens = [3] * call.num_speculative_tokens
    if tokens:
        tokens[number % len(tokens)] = wrong
    return proposal(tokens, [[token, 4] for token in tokens] or None)


def _wrong_shape(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
    reply = proposal([3, 4], [[3, 4], [4, 3]])
    reply.support_size = 3
    if number % 2:
        reply.draft_token_ids += b"\0"
    return reply


def _missing_q(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
    return proposal([3] * call.num_speculative_tokens)


def _q_of_other_tokens(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
    count = call.num_speculative_tokens
    return proposal([3] * count, [[5, 6]] * count or None)


def _q_without_weight(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
    count = call.num_speculative_tokens
    weight = (0.0, -1.0, float("nan"), float("inf"))[number % 4]
    return proposal([3] * count, [[3, 6]] * count or None, weight)


def _too_many(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
    count = (call.num_speculative_tokens + 1, 65, 300)[number % 3]
    return proposal([3] * count, [[3, 4]] * count)


def _error_on_open(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
    return draft_pb2.ProposeReply(
        error=status.to_call_error(CapacityExhausted("KV blocks", 1, 0)), cached_length=1
    )


def _unknown_error(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
    reply = draft_pb2.ProposeReply(cached_length=1)
    reply.error.code, reply.error.error = 13, "SomethingNew"
    return reply


def _boastful_length(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
    count = call.num_speculative_tokens
    reply = proposal([3] * count, [[3, 4]] * count or None)
    reply.cached_length = 2**32 - 1
    return reply


@pytest.mark.parametrize(
    ("script", "is_counted"),
    [
        pytest.param(_invalid_ids, False, id="ids outside the vocabulary"),
        pytest.param(_wrong_shape, True, id="q of another shape"),
        pytest.param(_missing_q, True, id="no q"),
        pytest.param(_q_of_other_tokens, True, id="q of other tokens"),
        pytest.param(_q_without_weight, True, id="q without weight"),
        pytest.param(_too_many, True, id="more tokens than asked"),
        pytest.param(_error_on_open, False, id="error on open, B149"),
        pytest.param(_unknown_error, False, id="an error of a newer build"),
        pytest.param(_boastful_length, False, id="more cached than there is"),
    ],
)
async def test_garbage_from_a_draft_costs_no_token_B035(script: Script, is_counted: bool) -> None:
    """Whatever a draft answers, all rules end with valid tokens, the exact ones where they are.

    Its answers that a script can name are in `contract/test_scripted_pair.py`.
    """
    async with (
        scripted_draft(script) as (draft, address),
        running_pair(draft=None, draft_addresses=(address,), draft_timeout_s=0.05) as pair,
    ):
        for rule in ("greedy", "coupled", "standard"):
            plain, answer = await asyncio.gather(
                pair.generate(make_request(rule=rule, max_tokens=24, k=0)),
                pair.generate(make_request(rule=rule, max_tokens=24)),
            )
            assert len(answer.token_ids) == 24
            assert all(0 <= token < 48 for token in answer.token_ids)
            assert answer.record is not None
            assert answer.record.num_target_reopens == 0
            if rule != "standard":
                assert answer.token_ids == plain.token_ids
        counter = pair.orchestrator.servicer._metrics.invalid_proposals
        assert (counter._value.get() > 0) == is_counted
        assert draft.calls
        await eventually(
            lambda: {call.session.session_id for call in draft.calls} <= set(draft.releases),
            "every session was released",
        )
        await pair.until_idle()


async def test_invalid_id_inside_a_block_rejects_from_there_on_B035() -> None:
    """Tokens before an invalid id may be accepted; it and what follows are not."""
    truth = greedy_tokens(TARGET, PROMPT, 40)

    def script(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
        if not call.num_speculative_tokens:
            return proposal([])
        session = call.session
        length = session.keep_length + len(session.append_token_ids) // 4
        following = (truth * 2)[length - 3 :][: call.num_speculative_tokens]
        following[2:] = [-1] * len(following[2:])
        return proposal(following)

    async with (
        scripted_draft(script) as (_, address),
        running_pair(draft=None, draft_addresses=(address,), k=5) as pair,
    ):
        answer = await pair.generate(make_request(max_tokens=40))
    assert answer.token_ids == truth
    assert answer.record is not None
    assert set(answer.record.per_step_accepted) == {2}
    assert set(answer.record.per_step_drafted[:-1]) == {5}


async def test_smaller_k_of_draft_and_configuration_is_used_B121() -> None:
    """A draft that makes at most 2 tokens is asked for 2, from the first request on."""

    def script(call: draft_pb2.ProposeCall, number: int) -> draft_pb2.ProposeReply:
        return proposal([3] * call.num_speculative_tokens)

    async with scripted_draft(script) as (draft, address):
        draft.max_num_speculative_tokens = 2
        async with running_pair(draft=None, draft_addresses=(address,), k=8) as pair:
            described = pair.orchestrator.pair.describe(include_token_table=False)
            assert described.num_speculative_tokens == 2
            answer = await pair.generate(make_request(max_tokens=12))
            with pytest.raises(grpc.aio.AioRpcError, match="at most the configured 2"):
                await pair.generate(make_request(k=3))
    assert answer.token_ids == greedy_tokens(TARGET, PROMPT, 12)
    assert max(call.num_speculative_tokens for call in draft.calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("k", [0, 4])
async def test_restarted_target_takes_the_stream_up_again_B152(rule: str, k: int) -> None:
    """A target that stops in mid-stream and comes back elsewhere in memory costs only a pause."""
    async with running_pair(SLOW_TARGET) as pair:
        plain = await pair.generate(make_request(rule=rule, max_tokens=80, k=0))
        answer = Generated()
        call = pair.blocks(make_request(rule=rule, max_tokens=80, k=k))
        await pair.take(call, answer, 20)
        await pair.target.stop()
        target = await make_target(port=port_of(pair.target.address))
        pair.owned.append(target)
        await pair.finish(call, answer)
        assert answer.token_ids == plain.token_ids
        assert answer.record is not None
        assert answer.record.num_target_reopens >= 1
        await eventually(lambda: is_idle(target), "the new target is idle")


@pytest.mark.slow
async def test_second_target_takes_over_B151() -> None:
    """With another replica the session moves there; the draft keeps its own."""
    other = await make_target()
    async with running_pair(SLOW_TARGET, target_addresses=None) as pair:
        pair.owned.append(other)
        answer = Generated()
        call = pair.blocks(make_request(rule="coupled", max_tokens=80))
        await pair.take(call, answer, 20)
        pair.orchestrator.update_peers(
            (pair.target.address, other.address), (pair.draft.address,) if pair.draft else ()
        )
        await eventually(
            lambda: len(pair.orchestrator.pair.targets.usable()) == 2, "both targets are usable"
        )
        await pair.target.stop()
        await pair.finish(call, answer)
        plain = await pair.generate(make_request(rule="coupled", max_tokens=80, k=0))
        assert answer.token_ids == plain.token_ids
        assert answer.record is not None
        assert answer.record.num_target_reopens == 1
        await eventually(lambda: is_idle(other), "the other target is idle")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("k", [0, 4])
async def test_lost_reply_is_asked_for_again_and_nothing_twice_B154(
    rule: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection cut after the target has acted: no token is repeated, none is missing.

    The call is sent again with its epoch and step: the session neither moves nor advances twice.
    """
    # However busy the machine is: a link that comes back later than this has lost its sessions.
    monkeypatch.setattr(link, "RECONNECT_TIMEOUT_S", 60.0)
    target = await make_target(SLOW_TARGET)
    async with (
        proxy_to(target.address) as (proxy, address),
        running_pair(target_addresses=(address,)) as pair,
    ):
        pair.owned.append(target)
        plain = await pair.generate(make_request(rule=rule, max_tokens=80, k=0))
        answer = Generated()
        call = pair.blocks(make_request(rule=rule, max_tokens=80, k=k))
        for num_tokens in (10, 30):
            await pair.take(call, answer, num_tokens)
            lost = proxy.num_lost
            proxy.lose_replies = True
            await eventually(lambda n=lost: proxy.num_lost > n, "a reply was lost")
            proxy.cut()
        await pair.finish(call, answer)
        assert answer.token_ids == plain.token_ids
        assert answer.record is not None
        assert answer.record.num_target_reopens == 0
        await eventually(lambda: is_idle(target), "the target is idle")


@pytest.mark.slow
async def test_clients_that_leave_at_any_phase_leave_no_kv_B074_B076_B187() -> None:
    """60 streams, the very first too, each cancelled at a random phase: no block is held then."""
    chance = random.Random(11)
    async with running_pair(SLOW_TARGET, DRAFT + ",step_ms=1") as pair:

        async def leave(number: int) -> None:
            call = pair.blocks(make_request([1 + number % 40] * 20, max_tokens=2000))
            answer = Generated()
            if number:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            await pair.take(call, answer, (1, 0, 1, 2, 7, 20)[number % 6])
            call.cancel()
            await asyncio.gather(call.code(), return_exceptions=True)

        await leave(0)
        await asyncio.gather(*(leave(number) for number in range(1, 60)))
        await pair.until_idle()
        answer = await pair.generate(make_request(max_tokens=20))
        assert answer.token_ids == greedy_tokens(TARGET, PROMPT, 20)
        await pair.until_idle()


async def test_deadline_ends_a_request_and_frees_its_kv() -> None:
    """A request's own deadline is kept, with DEADLINE_EXCEEDED, and nothing is left behind."""
    async with running_pair(SLOW_TARGET) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.generate(make_request(max_tokens=4000, timeout_s=0.1))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await pair.until_idle()


async def test_clients_deadline_ends_the_call_there_too_B164() -> None:
    """A client that waits 0.3 s for 30 s of text: the handler hears of it, and the KV is freed."""
    async with running_pair(TARGET + ",step_ms=30") as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in pair.stub.Generate(make_request(max_tokens=4000), timeout=0.3):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await pair.until_idle()


@pytest.mark.slow
async def test_thousand_cancelled_streams_cost_no_replica_B163() -> None:
    """Each is left at a random token: both replicas have the same devices afterwards, and idle."""
    chance = random.Random(12)
    async with running_pair(TARGET) as pair:
        devices = [service.replica.device for service in pair.owned]

        async def leave(number: int) -> None:
            call = pair.blocks(make_request([1 + number % 40] * 5, max_tokens=500))
            await pair.take(call, Generated(), chance.randrange(1, 12))
            call.cancel()
            await asyncio.gather(call.code(), return_exceptions=True)

        for start in range(0, 1000, 40):
            await asyncio.gather(*(leave(start + number) for number in range(40)))
        await pair.until_idle()
        assert [service.replica.device for service in pair.owned] == devices
        assert all(service.failure() is None for service in pair.owned)


@pytest.mark.slow
async def test_requests_wait_while_the_only_target_is_replaced_B172_B173() -> None:
    """Serve stops the old one first, and the new one may take a while, or fail to start at first:
    what was asked meanwhile is answered once one serves."""
    async with running_pair(TARGET) as pair:
        port = port_of(pair.target.address)
        await pair.target.stop()
        targets = pair.orchestrator.pair.targets
        await eventually(lambda: not targets.usable(), "the target is gone")
        asked = [asyncio.create_task(pair.generate(make_request(max_tokens=9))) for _ in range(5)]
        await eventually(lambda: pair.orchestrator.servicer.num_running == 5, "all wait")
        with pytest.raises(SpecServeError):
            await make_target("toy:no_such_key=1", port=port)
        assert not any(task.done() for task in asked)
        pair.owned.append(await make_target(port=port))
        answers = await asyncio.gather(*asked)
    assert {tuple(answer.token_ids) for answer in answers} == {
        tuple(greedy_tokens(TARGET, PROMPT, 9))
    }


async def test_waiting_for_a_slot_can_be_cancelled() -> None:
    """A request that left while it waited takes no slot and no KV; the next one gets its turn."""
    async with running_pair(SLOW_TARGET, max_num_requests=1) as pair:
        first = pair.blocks(make_request(max_tokens=4000))
        await pair.take(first, Generated(), 1)
        waiting = pair.blocks(make_request())
        servicer = pair.orchestrator.servicer
        # Calls start at their first read.
        reading = asyncio.ensure_future(waiting.read())
        await eventually(lambda: servicer.num_waiting == 1, "it waits")
        waiting.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await eventually(lambda: servicer.num_waiting == 0, "it is gone")
        first.cancel()
        await pair.until_idle()
        assert len((await pair.generate(make_request(max_tokens=5))).token_ids) == 5


async def test_no_target_in_time_is_unavailable_not_a_hang_B152() -> None:
    """Without a target a request ends with UNAVAILABLE once reopen_timeout_s is over, not later."""
    async with running_pair(reopen_timeout_s=0.5) as pair:
        await pair.target.stop()
        await eventually(lambda: not pair.orchestrator.pair.targets.usable(), "the target is gone")
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.generate(make_request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert 0.4 < loop.time() - began < 1.0 + 0.5
        assert pair.orchestrator.servicer.num_running == 0


@pytest.mark.slow
async def test_dead_device_is_restarted_and_its_streams_go_on_B152() -> None:
    """The device's thread dies in mid-stream: the replica starts another, tokens are the same."""
    async with running_pair(SLOW_TARGET) as pair:
        answer = Generated()
        call = pair.blocks(make_request(max_tokens=60))
        await pair.take(call, answer, 20)
        dead = pair.target.replica.device
        dead.failed.set_result(CapacityExhausted("device", 1, 0))
        await pair.finish(call, answer)
        assert answer.token_ids == greedy_tokens(TARGET, PROMPT, 60)
        assert pair.target.replica.device is not dead
        assert pair.target.failure() is None
        await dead.close()


@pytest.mark.slow
async def test_many_short_requests_leave_the_gauges_flat_B079_B155() -> None:
    """160 short requests, 20 at a time: after each batch every block is free again."""
    async with running_pair() as pair:
        chance = np.random.default_rng(3)
        for _ in range(8):
            await asyncio.gather(
                *(
                    pair.generate(
                        make_request(
                            [1 + int(chance.integers(40))] * int(chance.integers(1, 50)),
                            max_tokens=1 + int(chance.integers(6)),
                        )
                    )
                    for _ in range(20)
                )
            )
            await pair.until_idle()
        for service in (pair.target, pair.draft):
            assert service is not None
            # What pools scale back by: nothing of a request outlives it.
            assert service.stats()["num_sessions"] == service.stats()["num_waiting"] == 0
        links = [*pair.orchestrator.pair.targets.links.values()]
        assert [link.sessions for link in links] == [set()]
        assert [link.num_pending for link in links] == [0]


@pytest.mark.slow
async def test_no_text_is_ever_made_of_two_models() -> None:
    """A second model is refused while the first is there; a stream whose target comes back as
    another model fails instead of going on; once nothing runs, the new model serves."""
    async with running_pair(SLOW_TARGET, k=2, reopen_timeout_s=1.5) as pair:
        other = await make_target("toy:vocab_size=48,seed=8")
        pair.owned.append(other)
        draft = pair.draft
        assert draft is not None
        addresses = (pair.target.address, other.address)
        pair.orchestrator.update_peers(addresses, (draft.address,))
        targets = pair.orchestrator.pair.targets
        await eventually(lambda: targets.refusals, "the other model is refused")
        (refusal,) = targets.refusals.values()
        assert "the pool serves weights" in refusal
        # Clients may read it: who, but not where.
        assert refusal.startswith(other.replica_id)
        assert other.address not in refusal

        generated = Generated()
        call = pair.blocks(make_request(max_tokens=2000))
        await pair.take(call, generated, 8)
        await pair.target.stop()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await pair.take(call, generated, 2000)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert generated.token_ids == greedy_tokens(TARGET, (5, 6, 7), len(generated.token_ids))

        present = pair.orchestrator.pair
        await eventually(
            lambda: len(present.targets.usable()) == 1, "the new model serves once nothing runs"
        )
        answer = await pair.generate(make_request(max_tokens=12))
        assert answer.token_ids == greedy_tokens("toy:vocab_size=48,seed=8", (5, 6, 7), 12)
