"""A toy target, draft and orchestrator over real gRPC in one event loop, and requests to them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np

from helpers.waiting import eventually
from specserve.config import (
    DraftConfig,
    EngineConfig,
    OrchestratorConfig,
    ServerConfig,
    SpeculativeMethod,
    TargetConfig,
)
from specserve.draft.server import start_draft
from specserve.model.toy import ToySpec, toy_logits
from specserve.orchestrator.server import RunningOrchestrator, start_orchestrator
from specserve.rpc import codec
from specserve.rpc.channel import CLIENT_OPTIONS
from specserve.rpc.constraints_codec import pack_constraints
from specserve.rpc.replica_service import ReplicaService
from specserve.rpc.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from specserve.speculation.constraints import TokenConstraints
from specserve.target.server import start_target

TARGET = "toy:vocab_size=48,seed=7"
DRAFT = "toy:vocab_size=48,seed=7,noise=0.7,noise_seed=1"

RULES = {
    "greedy": common_pb2.ACCEPTANCE_RULE_GREEDY,
    "coupled": common_pb2.ACCEPTANCE_RULE_COUPLED,
    "standard": common_pb2.ACCEPTANCE_RULE_STANDARD,
}

_names = itertools.count()


def make_request(
    prompt: Sequence[int] = (5, 6, 7),
    *,
    rule: str = "greedy",
    k: int | None = None,
    max_tokens: int = 32,
    seed: int = 5,
    choice: int = 0,
    ignore_eos: bool = True,
    num_logprobs: int | None = None,
    committed: Sequence[int] = (),
    stop: Sequence[bytes] = (),
    stop_token_ids: Sequence[int] = (),
    timeout_s: float = 0.0,
    temperature: float | None = None,
    method: SpeculativeMethod | None = None,
    tenant_salt: bytes = b"",
    constraints: TokenConstraints | None = None,
) -> generation_pb2.GenerateRequest:
    """Make a request; k and method None take the configured ones."""
    if temperature is None:
        temperature = 0.0 if rule == "greedy" else 1.0
    return generation_pb2.GenerateRequest(
        request_id=f"request-{next(_names)}",
        prompt_token_ids=codec.pack_ids(prompt),
        committed_token_ids=codec.pack_ids(committed),
        max_tokens=max_tokens,
        sampling=common_pb2.SamplingParams(
            rule=RULES[rule],
            seed=seed,
            choice=choice,
            temperature=temperature,
            top_p=1.0,
            num_logprobs_plus_one=0 if num_logprobs is None else num_logprobs + 1,
            constraints=None if constraints is None else pack_constraints(constraints),
        ),
        num_speculative_tokens_plus_one=0 if k is None else k + 1,
        stop=stop,
        stop_token_ids=codec.pack_ids(stop_token_ids),
        ignore_eos=ignore_eos,
        include_origins=True,
        timeout_s=timeout_s,
        speculative_method=codec.pack_method(method),
        tenant_salt=tenant_salt,
    )


@dataclass(slots=True)
class Generated:
    """Everything one Generate call said."""

    token_ids: list[int] = field(default_factory=list)
    text: bytes = b""
    finish_reason: int = 0
    logprobs: list[generation_pb2.TokenLogprob] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    record: generation_pb2.SpeculationRecord | None = None

    def add(self, response: generation_pb2.GenerateResponse) -> None:
        """Take one block."""
        self.token_ids += codec.unpack_ids(response.token_ids, "token_ids")
        self.text += response.text
        self.finish_reason = response.finish_reason
        self.logprobs += response.logprobs
        self.origins += response.origins
        if response.HasField("record"):
            self.record = response.record


@dataclass(slots=True)
class Pair:
    """What a test holds of a running pair."""

    target: ReplicaService
    draft: ReplicaService | None
    orchestrator: RunningOrchestrator
    stub: generation_pb2_grpc.GenerationServiceStub
    channel: grpc.aio.Channel
    """To the orchestrator."""
    owned: list[ReplicaService]
    """Stopped at the end of the test, those that were started in its course too."""

    async def generate(self, request: generation_pb2.GenerateRequest) -> Generated:
        """Run a request to its end."""
        generated = Generated()
        async for response in self.stub.Generate(request):
            generated.add(response)
        return generated

    def blocks(self, request: generation_pb2.GenerateRequest) -> grpc.aio.UnaryStreamCall:
        """Start a request whose blocks the test takes one by one."""
        return self.stub.Generate(request)

    async def finish(self, call: grpc.aio.UnaryStreamCall, generated: Generated) -> Generated:
        """Take the rest of a started request."""
        while (response := await call.read()) is not grpc.aio.EOF:
            generated.add(response)
        assert await call.code() is grpc.StatusCode.OK
        return generated

    async def take(
        self, call: grpc.aio.UnaryStreamCall, generated: Generated, num_tokens: int
    ) -> None:
        """Take blocks until so many tokens have come."""
        while len(generated.token_ids) < num_tokens:
            response = await call.read()
            assert response is not grpc.aio.EOF, "the stream ended early"
            generated.add(response)

    async def until_idle(self, within_s: float = 10.0) -> None:
        """Wait until no service holds a session, a block or a request."""
        await eventually(lambda: self.orchestrator.servicer.num_running == 0, "requests", within_s)
        for service in (self.target, self.draft):
            if service is not None:
                await eventually(lambda s=service: is_idle(s), f"{service.replica_id}", within_s)


def is_idle(service: ReplicaService) -> bool:
    """Say whether a replica holds nothing: every block free, no session, no lease."""
    load = service.replica.device.load
    return (
        load.num_free_blocks == load.num_blocks
        and load.num_sessions == 0
        and service.replica.num_sessions == 0
    )


def engine(model: str, **fields: object) -> EngineConfig:
    """Configure a toy engine in a thread."""
    return EngineConfig.model_validate({"model": model, "device_mode": "thread", **fields})


async def make_target(model: str = TARGET, *, port: int = 0, **fields: object) -> ReplicaService:
    """Start a target."""
    return await start_target(
        TargetConfig(engine=engine(model, **fields), server=ServerConfig(port=port))
    )


async def make_draft(model: str = DRAFT, *, port: int = 0, **fields: object) -> ReplicaService:
    """Start a draft."""
    return await start_draft(
        DraftConfig(engine=engine(model, **fields), server=ServerConfig(port=port))
    )


@asynccontextmanager
async def running_pair(
    target: str = TARGET,
    draft: str | None = DRAFT,
    *,
    k: int = 4,
    speculative: dict[str, object] | None = None,
    target_fields: dict[str, object] | None = None,
    draft_fields: dict[str, object] | None = None,
    target_addresses: tuple[str, ...] | None = None,
    draft_addresses: tuple[str, ...] | None = None,
    wait: bool = True,
    **config: object,
) -> AsyncIterator[Pair]:
    """Start a target, a draft (None: none, or what draft_addresses names) and an orchestrator.

    Args:
        speculative: more fields of its SpeculativeConfig.
    """
    target_service = await make_target(target, **(target_fields or {}))
    draft_service = None if draft is None else await make_draft(draft, **(draft_fields or {}))
    owned = [service for service in (target_service, draft_service) if service is not None]
    if draft_addresses is None:
        draft_addresses = (draft_service.address,) if draft_service else ()
    orchestrator = await start_orchestrator(
        OrchestratorConfig.model_validate(
            {
                "speculative": {
                    "model": "draft",
                    "num_speculative_tokens": k,
                    # A test that asks for K draft tokens counts on getting them.
                    "num_speculative_tokens_schedule": "constant",
                    **(speculative or {}),
                },
                "target_addresses": target_addresses or (target_service.address,),
                "draft_addresses": draft_addresses,
                "heartbeat_s": 0.2,
                # A busy machine must not make proposals late that a test counts on.
                "draft_timeout_s": 5.0,
                "draft_catch_up_timeout_s": 5.0,
                **config,
            }
        )
    )
    try:
        async with grpc.aio.insecure_channel(
            orchestrator.address, options=CLIENT_OPTIONS
        ) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            pair = Pair(target_service, draft_service, orchestrator, stub, channel, owned)
            if wait:
                await eventually(lambda: is_ready(orchestrator), "the pair is ready")
            yield pair
    finally:
        await orchestrator.stop()
        for service in owned:
            await service.stop()


def is_ready(orchestrator: RunningOrchestrator) -> bool:
    """Say whether the pair is loaded and fits."""
    return orchestrator.pair.describe(include_token_table=False).ready


def port_of(address: str) -> int:
    """Return the port of host:port."""
    return int(address.rpartition(":")[2])


def greedy_tokens(model: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Decode greedily from the toy's own table: the truth, without any of our services."""
    spec = ToySpec.parse(model)
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(np.argmax(toy_logits(spec, tokens))))
    return tokens[len(prompt) :]


def prompts(
    count: int, seed: int = 0, *, longest: int = 40, vocab_size: int = 48
) -> Iterator[list[int]]:
    """Give prompts of mixed length, the same for the same seed."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        length = int(random.integers(1, longest + 1))
        yield random.integers(1, vocab_size, length).tolist()
