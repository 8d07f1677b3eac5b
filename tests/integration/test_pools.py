"""Several orchestrators over several targets and drafts: who goes where."""

from __future__ import annotations

import grpc
import pytest
from prometheus_client import generate_latest

from helpers.pair import (
    TARGET,
    Generated,
    greedy_tokens,
    is_idle,
    is_ready,
    make_draft,
    make_request,
    make_target,
    running_pair,
)
from helpers.waiting import eventually
from specserve.config import OrchestratorConfig
from specserve.orchestrator.pool import TargetLink
from specserve.orchestrator.server import start_orchestrator
from specserve.rpc.v1 import generation_pb2_grpc

pytestmark = pytest.mark.slow

MANY = 8000
"""More tokens than a stream gets to in any of these tests."""

SYSTEM = [(7 * number) % 40 + 1 for number in range(40)]
"""Two whole KV blocks that many prompts begin with."""


async def test_prompts_that_begin_alike_meet_on_one_target() -> None:
    """M:N: two orchestrators, two targets. The second request with a beginning finds it cached, and
    so does the first that the other orchestrator ever saw; every token is right."""
    async with running_pair() as pair:
        assert pair.draft is not None
        other_target = await make_target()
        pair.owned.append(other_target)
        targets = [pair.target, other_target]
        addresses = tuple(target.address for target in targets)
        pair.orchestrator.update_peers(addresses, [pair.draft.address])
        second = await start_orchestrator(
            OrchestratorConfig.model_validate(
                {
                    "speculative": {"model": "draft", "num_speculative_tokens": 4},
                    "target_addresses": addresses,
                    "draft_addresses": (pair.draft.address,),
                    "heartbeat_s": 0.2,
                }
            )
        )
        try:
            async with grpc.aio.insecure_channel(second.address) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                for orchestrator in (pair.orchestrator, second):
                    pool = orchestrator.pair.targets
                    await eventually(lambda p=pool: len(p.usable()) == 2, "both are usable")
                    await eventually(lambda o=orchestrator: is_ready(o), "the pair is ready")
                cached = []
                for number in range(6):
                    for orchestrator in (pair.orchestrator, second):
                        links = orchestrator.pair.targets.links.values()
                        await eventually(lambda ls=links: all(map(is_free, ls)), "all say so")
                    prompt = [*SYSTEM, 3, number + 1]
                    request = make_request(prompt, max_tokens=8)
                    answer = Generated()
                    async for response in (pair.stub, stub)[number % 2].Generate(request):
                        answer.add(response)
                    assert answer.token_ids == greedy_tokens(TARGET, prompt, 8)
                    assert answer.record is not None
                    cached.append(answer.record.cached_prompt_tokens)
            assert cached == [0, 32, 32, 32, 32, 32]
        finally:
            await second.stop()


def is_free(link: TargetLink) -> bool:
    """Say whether an orchestrator knows that a target holds nothing."""
    return link.load is not None and link.load.num_sessions == 0


async def test_session_goes_on_with_another_draft_at_any_round() -> None:
    """One target, two drafts, of which the one in use drains in mid-stream: the session attaches to
    the other between two rounds, and what it says is the target's own text."""
    async with running_pair(TARGET + ",step_ms=2") as pair:
        assert pair.draft is not None
        other = await make_draft()
        pair.owned.append(other)
        pair.orchestrator.update_peers([pair.target.address], [pair.draft.address, other.address])
        drafts = pair.orchestrator.pair.drafts
        assert drafts is not None
        await eventually(lambda: len(drafts.usable()) == 2, "both drafts are usable")
        call = pair.blocks(make_request(max_tokens=MANY))
        answer = Generated()
        await pair.take(call, answer, 12)
        used = next(link for link in drafts.links.values() if link.sessions)
        old, new = pair.draft, other
        if used.address != old.address:
            old, new = new, old
        await old.replica.drain(5.0)
        await eventually(lambda: is_idle(old), "the old draft is left")
        before = len(answer.token_ids)
        await pair.take(call, answer, before + 60)
        assert new.replica.num_sessions == 1
        call.cancel()
        assert answer.token_ids == greedy_tokens(TARGET, [5, 6, 7], len(answer.token_ids))


async def test_processor_time_of_a_session_round_is_a_metric() -> None:
    """Seconds and rounds of one orchestrator are counters; both grow with a request."""
    async with running_pair() as pair:
        before = pair.orchestrator.servicer.num_rounds
        await pair.generate(make_request(max_tokens=16))
        text = generate_latest(pair.orchestrator.registry).decode()
        values = {
            line.split()[0]: float(line.split()[1])
            for line in text.splitlines()
            if line.startswith("specserve_orchestrator_") and "{" not in line
        }
        assert values["specserve_orchestrator_num_rounds_total"] > before
        assert values["specserve_orchestrator_cpu_seconds_total"] > 0
        assert values["specserve_orchestrator_num_requests_running"] == 0
