"""A replica that drains is left early, between rounds; nobody's text knows of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

import grpc
import pytest

from helpers.pair import (
    DRAFT,
    TARGET,
    Generated,
    Pair,
    greedy_tokens,
    is_idle,
    make_draft,
    make_request,
    make_target,
    running_pair,
)
from helpers.waiting import eventually
from specserve.rpc import codec
from specserve.rpc.channel import open_channel
from specserve.rpc.replica_service import ReplicaService
from specserve.rpc.v1 import generation_pb2, generation_pb2_grpc
from specserve.tools.local import LocalPair, PairSpec

PROMPT = (5, 6, 7)
SLOW_TARGET = TARGET + ",step_ms=3"
DEADLINE_S = 60.0
MANY = 4000
"""More tokens than a stream gets to in any of these tests."""

pytestmark = pytest.mark.slow


def know(pair: Pair, targets: list[ReplicaService], drafts: list[ReplicaService]) -> None:
    """Tell the orchestrator of exactly these."""
    pair.orchestrator.update_peers(
        [target.address for target in targets], [draft.address for draft in drafts]
    )


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("k", [0, 4])
async def test_live_sessions_leave_a_draining_target_long_before_its_deadline(
    rule: str, k: int
) -> None:
    """Three streams move while the old target still serves: it holds nothing as soon as each has
    had an answer elsewhere, and every token is the one that a stream left alone would have had."""
    async with running_pair(SLOW_TARGET, num_decode_steps=256) as pair:
        assert pair.draft is not None
        requests = [
            make_request(prompt, rule=rule, k=k, max_tokens=MANY)
            for prompt in (PROMPT, [1] * 40, [9, 8])
        ]
        calls = [pair.blocks(request) for request in requests]
        answers = [Generated() for _ in calls]
        for call, answer in zip(calls, answers, strict=True):
            await pair.take(call, answer, 10)
        other = await make_target(SLOW_TARGET)
        pair.owned.append(other)
        know(pair, [pair.target, other], [pair.draft])
        targets = pair.orchestrator.pair.targets
        await eventually(lambda: len(targets.usable()) == 2, "both targets are usable")

        async with asyncio.timeout(DEADLINE_S / 4):
            await pair.target.drain(DEADLINE_S)
        await eventually(lambda: is_idle(pair.target), "the old target holds nothing")
        assert other.replica.num_sessions == len(calls)

        for call, answer in zip(calls, answers, strict=True):
            await pair.take(call, answer, len(answer.token_ids) + 60)
            call.cancel()
        for request, answer in zip(requests, answers, strict=True):
            request.max_tokens = len(answer.token_ids)
            request.num_speculative_tokens_plus_one = 1
            assert (await pair.generate(request)).token_ids == answer.token_ids


async def test_move_is_recorded_as_one_reopening() -> None:
    """Its record says so, and only so: one reopening, no late proposal, the prompt cached once."""
    async with running_pair(SLOW_TARGET) as pair:
        assert pair.draft is not None
        other = await make_target(SLOW_TARGET)
        pair.owned.append(other)
        answer, call = Generated(), pair.blocks(make_request(max_tokens=120))
        await pair.take(call, answer, 10)
        know(pair, [pair.target, other], [pair.draft])
        targets = pair.orchestrator.pair.targets
        await eventually(lambda: len(targets.usable()) == 2, "both targets are usable")
        await pair.target.drain(DEADLINE_S)
        await pair.finish(call, answer)
        assert answer.token_ids == greedy_tokens(TARGET, PROMPT, 120)
        assert answer.record is not None
        assert answer.record.num_target_reopens == 1
        assert answer.record.num_late_proposals == 0
        await eventually(lambda: is_idle(other), "the other target is idle too")


async def test_without_another_target_a_session_ends_in_place() -> None:
    """Nothing is cut before the deadline; one that comes up meanwhile takes the session over."""
    async with running_pair(SLOW_TARGET) as pair:
        assert pair.draft is not None
        long = pair.blocks(make_request(max_tokens=MANY))
        answer = Generated()
        await pair.take(long, answer, 5)
        short = asyncio.create_task(pair.generate(make_request(max_tokens=60)))
        await eventually(lambda: pair.target.replica.num_sessions == 2, "both run")
        draining = asyncio.create_task(pair.target.drain(DEADLINE_S))
        whole = await short
        assert whole.token_ids == greedy_tokens(TARGET, PROMPT, 60)
        assert whole.record is not None
        assert whole.record.num_target_reopens == 0
        assert not draining.done()

        other = await make_target(SLOW_TARGET)
        pair.owned.append(other)
        know(pair, [pair.target, other], [pair.draft])
        await asyncio.wait_for(draining, DEADLINE_S / 4)
        await pair.take(long, answer, len(answer.token_ids) + 20)
        long.cancel()
        expected = greedy_tokens(TARGET, PROMPT, len(answer.token_ids))
        assert answer.token_ids == expected


async def test_session_that_another_target_refuses_stays_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The old session is let go only once another has answered: a full replica costs nothing."""
    caplog.set_level(logging.INFO, "specserve.orchestrator")
    full = await make_target(SLOW_TARGET, num_kv_blocks=2, block_size=16, max_model_len=4096)
    async with running_pair(SLOW_TARGET) as pair:
        assert pair.draft is not None
        pair.owned.append(full)
        answer, call = Generated(), pair.blocks(make_request(max_tokens=200))
        await pair.take(call, answer, 40)
        know(pair, [pair.target, full], [pair.draft])
        targets = pair.orchestrator.pair.targets
        await eventually(lambda: len(targets.usable()) == 2, "both targets are usable")
        draining = asyncio.create_task(pair.target.drain(DEADLINE_S))
        await pair.finish(call, answer)
        await asyncio.wait_for(draining, DEADLINE_S / 4)
        assert answer.token_ids == greedy_tokens(TARGET, PROMPT, 200)
        assert answer.record is not None
        assert answer.record.num_target_reopens == 0
        assert "stays on target " + pair.target.address in caplog.text
        await eventually(lambda: is_idle(full), "and holds nothing")


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_live_sessions_leave_a_draining_draft(rule: str) -> None:
    """The stream is drafted for by the other draft, and the old one holds nothing."""
    async with running_pair(SLOW_TARGET) as pair:
        assert pair.draft is not None
        other = await make_draft(DRAFT)
        pair.owned.append(other)
        request = make_request(rule=rule, max_tokens=MANY)
        answer, call = Generated(), pair.blocks(request)
        await pair.take(call, answer, 10)
        know(pair, [pair.target], [pair.draft, other])
        drafts = pair.orchestrator.pair.drafts
        assert drafts is not None
        await eventually(lambda: len(drafts.usable()) == 2, "both drafts are usable")

        async with asyncio.timeout(DEADLINE_S / 4):
            await pair.draft.drain(DEADLINE_S)
        await eventually(lambda: is_idle(pair.draft), "the old draft holds nothing")

        seen = len(answer.token_ids) + 1
        while generation_pb2.TOKEN_ORIGIN_ACCEPTED not in answer.origins[seen:]:
            await pair.take(call, answer, len(answer.token_ids) + 1)
        call.cancel()
        assert other.replica.num_sessions == 1
        plain = make_request(rule=rule, max_tokens=len(answer.token_ids), k=0)
        assert (await pair.generate(plain)).token_ids == answer.token_ids


async def test_lost_orchestrators_leave_nothing_that_blocks_a_drain() -> None:
    """One died and one hangs, both with sessions open: the leases run out, and a target that is
    told to stop ends by itself long before its deadline, with exit code 0."""
    spec = PairSpec(
        SLOW_TARGET,
        None,
        num_orchestrators=2,
        num_gateways=0,
        target_flags=("--drain-deadline-s=600", "--lease-s=1"),
    )
    async with LocalPair(spec) as pair, contextlib.AsyncExitStack() as stack:
        calls = []
        for orchestrator in pair.orchestrators:
            channel = await stack.enter_async_context(open_channel(orchestrator.address))
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            calls.append(stub.Generate(make_request([7] * 8, max_tokens=MANY)))
            assert await calls[-1].read() is not grpc.aio.EOF
        dead, hung = pair.orchestrators
        dead.kill()
        hung.send_signal(signal.SIGSTOP)
        assert await pair.targets[0].stop() == 0, "it had to be killed"
        hung.send_signal(signal.SIGCONT)
        for call in calls:
            call.cancel()


NEW_TARGET = "toy:vocab_size=48,seed=8,step_ms=3"


async def test_rolling_update_of_weights_fails_nothing_and_mixes_no_text() -> None:
    """Targets of other weights come, the old ones drain one by one, requests go on all the while:
    each is answered whole, by one model alone; streams that had begun end on the old one."""
    async with running_pair(SLOW_TARGET) as pair:
        assert pair.draft is not None
        second, *new = [await make_target(model) for model in (SLOW_TARGET, NEW_TARGET, NEW_TARGET)]
        pair.owned += [second, *new]
        know(pair, [pair.target, second], [pair.draft])
        served = pair.orchestrator.pair
        await eventually(lambda: len(served.targets.usable()) == 2, "both old ones are usable")
        longest = [pair.blocks(make_request([number] * 9, max_tokens=150)) for number in (1, 2)]
        answers = [Generated() for _ in longest]
        for call, answer in zip(longest, answers, strict=True):
            await pair.take(call, answer, 5)

        finished: list[Generated] = []
        is_over = False

        async def keep_asking() -> None:
            while not is_over:
                finished.append(await pair.generate(make_request(max_tokens=12)))

        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        know(pair, [pair.target, second, *new], [pair.draft])
        await eventually(lambda: len(served.targets.refusals) == 2, "new ones wait for their turn")
        for old in (pair.target, second):
            await old.drain(DEADLINE_S)
        know(pair, new, [pair.draft])
        for call, answer in zip(longest, answers, strict=True):
            await pair.finish(call, answer)
        await eventually(lambda: len(served.targets.usable()) == 2, "both new ones are usable")
        count = len(finished)
        await eventually(lambda: len(finished) > count + 6, "requests go on")
        is_over = True
        await asyncio.gather(*asking)
    for number, answer in zip((1, 2), answers, strict=True):
        assert answer.token_ids == greedy_tokens(TARGET, [number] * 9, 150)
    texts = [tuple(greedy_tokens(model, PROMPT, 12)) for model in (TARGET, NEW_TARGET)]
    given = [tuple(answer.token_ids) for answer in finished]
    assert set(given) == set(texts)
    assert given[-1] == texts[1]


async def test_text_is_not_carried_over_to_another_model() -> None:
    """A stream whose orchestrator was lost goes on only where the same weights are served."""
    async with running_pair(TARGET) as pair:
        request = make_request(max_tokens=20)
        first = await anext(aiter(pair.blocks(request)))
        request.committed_token_ids = first.token_ids
        request.target_identity = first.target_identity
        rest = await pair.generate(request)
        begun = list(codec.unpack_ids(first.token_ids, ""))
        assert begun + rest.token_ids == greedy_tokens(TARGET, PROMPT, 20)

        request.target_identity = first.target_identity.replace("float32", "bfloat16")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pair.generate(request)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_process_told_to_stop_ends_while_its_streams_go_on() -> None:
    """SIGTERM to a target, then to a draft, each with live streams and a deadline of a minute: the
    process is gone within seconds, by itself, and no stream has lost or changed a token."""
    spec = PairSpec(
        SLOW_TARGET,
        DRAFT,
        num_targets=2,
        num_drafts=2,
        num_gateways=0,
        target_flags=(f"--drain-deadline-s={DEADLINE_S}",),
        draft_flags=(f"--drain-deadline-s={DEADLINE_S}",),
    )
    prompts = [[1 + number] * 8 for number in range(4)]
    async with LocalPair(spec) as pair, open_channel(pair.orchestrators[0].address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.Generate(make_request(prompt, max_tokens=MANY)) for prompt in prompts]
        answers = [Generated() for _ in calls]

        async def take_each(num_tokens: int) -> None:
            for call, answer in zip(calls, answers, strict=True):
                wanted = len(answer.token_ids) + num_tokens
                while len(answer.token_ids) < wanted:
                    response = await call.read()
                    assert response is not grpc.aio.EOF, "the stream ended early"
                    answer.add(response)

        async def sessions_at(address: str) -> int:
            status = await stub.GetStatus(generation_pb2.GetStatusRequest())
            return sum(r.num_sessions for r in status.replicas if r.address == address)

        await take_each(10)
        for one, other in (pair.targets, pair.drafts):
            # All of them, where the second was not yet known when the streams began.
            if await sessions_at(one.address) == 0:
                one, other = other, one
            assert await sessions_at(one.address) > 0
            assert await one.stop() == 0, "it had to be killed"
            await take_each(40)
            assert await sessions_at(other.address) == len(calls)
        for call, prompt, answer in zip(calls, prompts, answers, strict=True):
            call.cancel()
            assert answer.token_ids == greedy_tokens(TARGET, prompt, len(answer.token_ids))
