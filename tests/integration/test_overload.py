"""More than there is room for: who waits, is refused, loses its blocks; every token right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx
import pytest

from helpers.pair import (
    TARGET,
    Generated,
    Pair,
    engine,
    greedy_tokens,
    is_idle,
    is_ready,
    make_request,
    make_target,
    prompts,
    running_pair,
)
from helpers.waiting import eventually
from specserve.config import OrchestratorConfig
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.http import create_http_app
from specserve.model.tokenizer import load_tokenizer
from specserve.orchestrator.server import RunningOrchestrator, start_orchestrator
from specserve.rpc.status import from_rpc_error
from specserve.rpc.v1 import generation_pb2_grpc

pytestmark = pytest.mark.slow

Stub = generation_pb2_grpc.GenerationServiceStub


@dataclass
class Crowd:
    """Two small targets, one draft, three orchestrators."""

    pair: Pair
    orchestrators: list[RunningOrchestrator]
    stubs: list[Stub]

    async def until_idle(self) -> None:
        """Wait until nothing is held anywhere."""
        for service in self.pair.owned:
            await eventually(lambda s=service: is_idle(s), service.replica_id, 10.0)

    @property
    def num_preemptions(self) -> float:
        """Sessions that lost their blocks, as the orchestrators count them."""
        return sum(
            o.registry.get_sample_value("specserve_orchestrator_num_preemptions_total") or 0.0
            for o in self.orchestrators
        )


@asynccontextmanager
async def crowd(num_kv_blocks: int) -> AsyncIterator[Crowd]:
    """Start it; a block holds 16 tokens."""
    fields: dict[str, object] = {"num_kv_blocks": num_kv_blocks}
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(running_pair(target_fields=fields))
        assert pair.draft is not None
        pair.owned.append(await make_target(**fields))
        addresses = tuple(service.address for service in (pair.target, pair.owned[-1]))
        pair.orchestrator.update_peers(addresses, [pair.draft.address])
        orchestrators, stubs = [pair.orchestrator], [pair.stub]
        for _ in range(2):
            other = await start_orchestrator(
                OrchestratorConfig.model_validate(
                    {
                        "speculative": {"model": "draft", "num_speculative_tokens": 4},
                        "target_addresses": addresses,
                        "draft_addresses": (pair.draft.address,),
                        "heartbeat_s": 0.2,
                        "draft_timeout_s": 5.0,
                    }
                )
            )
            stack.push_async_callback(other.stop)
            channel = grpc.aio.insecure_channel(other.address)
            await stack.enter_async_context(channel)
            orchestrators.append(other)
            stubs.append(Stub(channel))
        for orchestrator in orchestrators:
            pool = orchestrator.pair.targets
            await eventually(lambda p=pool: len(p.usable()) == 2, "both targets are usable")
            await eventually(lambda o=orchestrator: is_ready(o), "the pair is ready")
        yield Crowd(pair, orchestrators, stubs)


async def run(stub: Stub, request: object) -> Generated:
    generated = Generated()
    async for response in stub.Generate(request):
        generated.add(response)
    return generated


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_sessions_that_lose_their_blocks_go_on_exactly_and_all_of_them_end(rule: str) -> None:
    """B079: fifteen streams of three orchestrators on blocks for about six. Preempted ones are
    opened anew, here or there, and every text is that of a stream alone; nobody is starved, though
    each orchestrator opens its sessions without the others' knowledge, and nothing is left."""
    async with crowd(12) as made:
        wanted = list(prompts(15, seed=3, longest=20))
        requests = [make_request(p, rule=rule, max_tokens=50, seed=9) for p in wanted]
        stubs = made.stubs
        async with asyncio.timeout(120):
            answers = await asyncio.gather(
                *(run(stubs[n % 3], request) for n, request in enumerate(requests))
            )
        assert made.num_preemptions > 0
        for prompt, answer in zip(wanted, answers, strict=True):
            if rule == "greedy":
                alone = greedy_tokens(TARGET, prompt, 50)
            else:
                request = make_request(prompt, rule=rule, max_tokens=50, seed=9, k=0)
                alone = (await run(stubs[0], request)).token_ids
            assert answer.token_ids == alone
        await made.until_idle()


async def test_urgent_request_takes_the_blocks_of_an_ordinary_one_which_goes_on_later() -> None:
    """Both together need more than there is. However far the ordinary one has come when the urgent
    one comes, it loses its blocks; its text is whole all the same."""
    model = TARGET + ",step_ms=10"
    async with running_pair(model, None, k=0, target_fields={"num_kv_blocks": 12}) as pair:
        ordinary = pair.blocks(make_request([7] * 20, max_tokens=160))
        answer = Generated()
        await pair.take(ordinary, answer, 1)
        request = make_request([9] * 20, max_tokens=100)
        request.priority = 1
        urgent = await pair.generate(request)
        assert urgent.token_ids == greedy_tokens(model, [9] * 20, 100)
        await pair.finish(ordinary, answer)
        assert answer.token_ids == greedy_tokens(model, [7] * 20, 160)
        assert answer.record is not None
        assert answer.record.num_target_reopens >= 1
        await pair.until_idle()


async def test_request_that_finds_no_blocks_in_time_is_told_when_to_come_back() -> None:
    """Neither a hang nor a loss: RESOURCE_EXHAUSTED, by HTTP a 429 with Retry-After and no 5xx
    (B166); the running one is undisturbed."""
    fields: dict[str, object] = {"num_kv_blocks": 6}
    model = TARGET + ",step_ms=40"
    async with (
        running_pair(model, None, k=0, target_fields=fields, queue_timeout_s=0.05) as pair,
        gateway_before(pair.orchestrator.address, model) as client,
    ):
        call = pair.blocks(make_request([7] * 40, max_tokens=50))
        answer = Generated()
        await pair.take(call, answer, 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.generate(make_request([9] * 60, max_tokens=20))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(caught.value, "orchestrator")
        assert type(error).__name__ == "Overloaded"
        refused = await client.post("/v1/completions", json={"prompt": [9] * 60})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        await pair.finish(call, answer)
        assert answer.token_ids == greedy_tokens(model, [7] * 40, 50)
        metric = "specserve_orchestrator_num_requests_refused_total"
        assert pair.orchestrator.registry.get_sample_value(metric) == 2.0
        await pair.until_idle()


@asynccontextmanager
async def gateway_before(orchestrator: str, model: str) -> AsyncIterator[httpx.AsyncClient]:
    """Give a client of a gateway that asks this orchestrator."""
    backend = GrpcBackend([orchestrator])
    app = create_http_app(backend, load_tokenizer(engine(model)), GatewayConfig())
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            assert (await client.get("/ready")).status_code == 200
            yield client
    finally:
        await backend.close()


async def test_draft_that_cannot_keep_up_is_asked_for_less() -> None:
    """Ten sessions on a draft that serves one at a time: rounds ask for fewer draft tokens, or for
    none, rather than let the target wait; every text is the target's."""
    slow = "toy:vocab_size=48,seed=7,noise=0.7,noise_seed=1,step_ms=20"
    async with running_pair(TARGET + ",step_ms=2", slow, draft_fields={"max_num_seqs": 1}) as pair:
        wanted = list(prompts(10, seed=5, longest=10))
        answers = await asyncio.gather(
            *(pair.generate(make_request(prompt, max_tokens=60)) for prompt in wanted)
        )
        for prompt, answer in zip(wanted, answers, strict=True):
            assert answer.token_ids == greedy_tokens(TARGET, prompt, 60)
        pressed = pair.orchestrator.registry.get_sample_value(
            "specserve_orchestrator_num_rounds_by_reason_total", {"reason": "draft_pressure"}
        )
        assert pressed is not None
        assert pressed > 0
