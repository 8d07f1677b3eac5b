"""Brings up what a run measures: systems and peers, started or reached, warm, and described.

Knows options and how each thing is started; measures nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError, PeerUnavailable
from specserve.tools.bench.conditions import Conditions, DeploymentFacts, ModelFacts
from specserve.tools.bench.deployment import (
    WARM_UP,
    Deployment,
    Running,
    reached,
    running,
    warm_up,
)
from specserve.tools.bench.host import describe_hardware, describe_versions
from specserve.tools.bench.http import reached_by_url
from specserve.tools.bench.level import Notify
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.peer_spec import PeerSpec, check_peer, peer_specs
from specserve.tools.bench.peers import PeerArm, running_peer
from specserve.tools.bench.workload import Workload, check_fits, check_remembered, load_workload

OURS = "specserve"
"""Name of a deployment when there is only one."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that is up and warm."""

    systems: tuple[Running, ...]
    peers: tuple[PeerArm, ...]
    workload: Workload
    conditions: Conditions


@asynccontextmanager
async def up(
    options: BenchOptions,
    deployments: Sequence[Deployment],
    notify: Notify,
    *,
    peers: Sequence[PeerSpec] = (),
    warm: bool = True,
) -> AsyncIterator[Stage]:
    """Bring everything up, warm it, and describe it; all of it ends on leaving.

    Args:
        deployments: what to start; without any, the system that the options name is reached.
        warm: send every prompt once; a run that only counts needs none.

    Raises:
        ConfigurationError: the prompts do not fit, one by one or all together.
        PeerUnavailable: something did not come up, or refuses the warm-up.
    """
    workload = load_workload(options.prompts, options.num_prompts, tokenizer_of(options))
    ways: Sequence[AbstractAsyncContextManager[Running]] = [
        running(deployment) for deployment in deployments
    ]
    ways = ways or [_reached(options)]
    async with AsyncExitStack() as stack:
        systems: list[Running] = []
        for number, way in enumerate(ways):
            notify("starting services", number / len(ways))
            systems.append(await stack.enter_async_context(way))
        notify("starting services", 1.0)
        target = next(iter(systems[0].facts.models), None)
        if target is not None:
            check_fits(workload.prompts, options.settings.max_tokens, target.max_model_len)
        if warm and options.engine.enable_prefix_caching:
            for model in systems[0].facts.models:
                check_remembered(
                    workload.prompts,
                    options.settings.max_tokens,
                    model,
                    num_answers=1 if options.settings.temperature == 0 else 2,
                )
        arms: list[PeerArm] = []
        for spec in peers:
            notify(f"loading {spec.name}", 0.0)
            # Where ours runs, and in its type.
            if target is not None:
                spec = replace(spec, dtype=target.dtype, device=target.device)
            arms.append(await stack.enter_async_context(running_peer(spec, options.settings)))
            notify(f"loading {spec.name}", 1.0)
        if warm:
            await _warm(systems, arms, workload, notify)
        facts = [
            replace(system.facts, resident_bytes=system.resident_bytes()) for system in systems
        ]
        facts += [arm.facts() for arm in arms]
        conditions = Conditions(
            hardware=describe_hardware(),
            versions=describe_versions(),
            deployments=tuple(facts),
            prompts=workload.facts,
            sampling=options.settings,
            warm_up=WARM_UP if warm else "None: the figures of this suite are counts.",
        )
        yield Stage(tuple(systems), tuple(arms), workload, conditions)


def peers_of(options: BenchOptions, deployment: Deployment | None) -> list[PeerSpec]:
    """Describe the peers to start.

    Raises:
        ConfigurationError: one cannot run, or there is nothing of ours that it could run beside.
    """
    if not options.peers.names:
        return []
    if deployment is None or deployment.speculative is None:
        raise ConfigurationError("--peer: it runs beside services that this command starts")
    specs = peer_specs(
        options.peers.names,
        deployment.target,
        deployment.speculative.model,
        vllm_python=options.peers.vllm_python,
        dtype=options.engine.dtype,
        device="cpu" if options.engine.device == "auto" else options.engine.device,
        num_threads=options.engine.num_threads,
        num_speculative_tokens=deployment.speculative.num_speculative_tokens,
        vllm_arguments=options.peers.vllm_arguments or {},
    )
    for spec in specs:
        check_peer(spec)
    return specs


def tokenizer_of(options: BenchOptions) -> EngineConfig | None:
    """Return the target whose tokenizer makes the prompts' ids; None leaves that to a gateway.

    Raises:
        ConfigurationError: an orchestrator takes ids only, and no target was named.
    """
    if options.url is not None:
        return None
    if options.orchestrator_address is not None and options.target is None:
        raise ConfigurationError("--target: missing; its tokenizer makes the prompts' token ids")
    return options.engine.model_copy(update={"model": options.pair().target})


def models_of(stage: Stage) -> tuple[ModelFacts, ...]:
    """Return the models of the first system."""
    return stage.systems[0].facts.models


def _reached(options: BenchOptions) -> AbstractAsyncContextManager[Running]:
    if options.url is not None:
        return reached_by_url(OURS, options.url, options.headers)
    return reached(OURS, options.orchestrator_address or "", options.tls)


async def _warm(
    systems: Sequence[Running], arms: Sequence[PeerArm], workload: Workload, notify: Notify
) -> None:
    count = len(systems) + len(arms)
    for number, system in enumerate(systems):
        notify("warming up", number / count)
        wave = await warm_up(system, workload.prompts)
        if not wave.good:
            raise PeerUnavailable(system.name, f"no prompt was served: {wave.samples[0].error}")
    for number, arm in enumerate(arms, len(systems)):
        notify("warming up", number / count)
        await arm.warm_up(workload.prompts)
    notify("warming up", 1.0)


def fact_of(conditions: Conditions, name: str) -> DeploymentFacts | None:
    """Return one deployment's description, if it is there."""
    return next((each for each in conditions.deployments if each.name == name), None)
