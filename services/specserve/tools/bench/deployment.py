"""The systems under measurement: started here as plain processes, or reached where they run.

Knows which settings make a deployment and how its sides are asked; measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from specserve.config import SpeculativeConfig
from specserve.rpc.tls import MutualTls
from specserve.speculation.length_choice import SpeculationMode
from specserve.tools.bench.clients import GrpcServingClient, RequestSettings, ServingClient
from specserve.tools.bench.conditions import DeploymentFacts, model_facts
from specserve.tools.bench.host import resident_bytes
from specserve.tools.bench.pacing import run_wave
from specserve.tools.bench.sample import BenchPrompt, Sample, Wave
from specserve.tools.generation_client import GenerationClient
from specserve.tools.load.arrivals import Pacing
from specserve.tools.local import LocalPair, PairSpec

WARM_UP_TOKENS = 4
"""Enough for a speculative round: the draft has seen every prompt too."""

WARM_UP_CONCURRENCY = 4

WARM_UP = (
    f"Every prompt is sent once to every deployment for {WARM_UP_TOKENS} tokens before anything is "
    "measured, so that prefix caches are equally warm."
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What to start."""

    name: str
    target: str
    """Model directory, hub id or toy:..."""
    speculative: SpeculativeConfig | None
    engine_flags: tuple[str, ...] = ()
    orchestrator_flags: tuple[str, ...] = ()
    num_twins: int = 0
    """More orchestrators beside the first, on the same devices: each learns for itself."""

    @property
    def speculative_json(self) -> str:
        """Every key of the speculative configuration, for a record; empty when there is none.

        A draft in a directory is named, as models are elsewhere: where it lies is no condition.
        """
        if self.speculative is None:
            return ""
        values = self.speculative.model_dump(mode="json", exclude_none=True)
        model = values.get("model", "")
        if Path(model).is_dir():
            values["model"] = Path(model).name
        return json.dumps(values)

    def pair_spec(self) -> PairSpec:
        """Return the processes that make it up."""
        return PairSpec(
            target=self.target,
            draft=None if self.speculative is None else self.speculative.model,
            speculative_config=None
            if self.speculative is None
            else self.speculative.model_dump_json(exclude_defaults=True),
            num_orchestrators=1 + self.num_twins,
            num_gateways=0,
            engine_flags=self.engine_flags,
            orchestrator_flags=self.orchestrator_flags,
        )


@dataclass(frozen=True, slots=True)
class Twin:
    """Another orchestrator on the devices of a deployment, whose speculation may be switched."""

    client: ServingClient
    switch: Callable[[SpeculationMode], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Running:
    """A deployment that answers."""

    client: ServingClient
    facts: DeploymentFacts
    pids: tuple[int, ...] = ()
    """Of its processes, when they are ours."""
    twins: tuple[Twin, ...] = ()
    """The orchestrators beside the first."""

    @property
    def name(self) -> str:
        """The deployment's name."""
        return self.facts.name

    def resident_bytes(self) -> int | None:
        """Memory of its processes now; None when they are not ours to see."""
        return resident_bytes(self.pids) if self.pids else None


@asynccontextmanager
async def running(deployment: Deployment) -> AsyncIterator[Running]:
    """Start a deployment's processes; they stop on leaving.

    Raises:
        PeerUnavailable: a process did not become ready; its last words are kept.
    """
    async with AsyncExitStack() as stack:
        local = await stack.enter_async_context(LocalPair(deployment.pair_spec()))
        client, *twins = [
            await stack.enter_async_context(GenerationClient(each.address))
            for each in local.orchestrators
        ]
        pair = await client.wait_ready()
        facts = DeploymentFacts(
            name=deployment.name,
            address="",
            speculative_config=deployment.speculative_json,
            engine_flags=deployment.engine_flags,
            models=model_facts(pair),
            versions={},
        )
        pids = tuple(service.pid for service in local.services)
        others = tuple(Twin(GrpcServingClient(each), each.switch) for each in twins)
        yield Running(GrpcServingClient(client), facts, pids, others)


@asynccontextmanager
async def reached(name: str, address: str, tls: MutualTls | None = None) -> AsyncIterator[Running]:
    """Reach an orchestrator that runs already.

    Args:
        tls: None speaks clear text.

    Raises:
        PeerUnavailable: it does not answer, or its pair is not ready.
    """
    async with GenerationClient(address, tls=tls) as client:
        pair = await client.wait_ready(timeout_s=30)
        config = {"num_speculative_tokens": pair.num_speculative_tokens}
        facts = DeploymentFacts(
            name=name,
            address=address,
            speculative_config=json.dumps(config) if pair.speculation_enabled else "",
            engine_flags=(),
            models=model_facts(pair),
            versions={},
        )
        yield Running(GrpcServingClient(client), facts)


@dataclass(frozen=True, slots=True)
class SystemArm:
    """A setting of a running deployment."""

    name: str
    system: Running
    settings: RequestSettings
    num_speculative_tokens: int | None = None
    """None takes what is configured; 0 switches speculation off."""

    @property
    def deployment(self) -> str:
        """Name of the deployment."""
        return self.system.name

    async def run(self, prompts: Sequence[BenchPrompt], pacing: Pacing, label: str) -> Wave:
        """Decode the prompts and measure them."""
        ids = {id(prompt): f"bench-{label}-{number}" for number, prompt in enumerate(prompts)}

        async def decode(prompt: BenchPrompt) -> Sample:
            return await self.system.client.decode(
                prompt, self.settings, ids[id(prompt)], self.num_speculative_tokens
            )

        read = self.system.client.read
        return await run_wave(decode, prompts, pacing, read=read, seed=self.settings.seed)


async def warm_up(system: Running, prompts: Sequence[BenchPrompt]) -> Wave:
    """Send every prompt once, for a few tokens."""
    settings = RequestSettings(WARM_UP_TOKENS, temperature=0.0, ignore_eos=True, seed=0)
    arm = SystemArm("warm-up", system, settings, None)
    return await arm.run(prompts, Pacing(concurrency=WARM_UP_CONCURRENCY), f"warm-{system.name}")
