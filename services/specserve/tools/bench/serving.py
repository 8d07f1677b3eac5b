"""`specserve bench --suite serving`: speculation against target-only, in alternating pairs.

Every side decodes the same prompts in turns, other engines too if asked for; the thresholds are
printed before anything is measured, and the decision follows from them alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.tools.bench.conditions import ModelFacts
from specserve.tools.bench.decision import SPECULATIVE, TARGET_ONLY, decide
from specserve.tools.bench.deployment import Deployment, SystemArm
from specserve.tools.bench.level import Arm, Level, Notify, run_level
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.padding import measure_padding
from specserve.tools.bench.peers import PeerArm
from specserve.tools.bench.record import Record, Section
from specserve.tools.bench.stage import OURS, models_of, peers_of, up
from specserve.tools.bench.thresholds import Thresholds
from specserve.tools.bench.workload import plan_level
from specserve.tools.load.arrivals import Pacing
from specserve.tools.terminal import say


async def run_serving(options: BenchOptions, record: Record, notify: Notify) -> None:
    """Measure every level and decide."""
    deployments = [options.deployment(OURS)] if options.starts_services else []
    peers = peers_of(options, next(iter(deployments), None))
    section = record.section("serving")
    thresholds = options.thresholds
    if not options.starts_services:
        thresholds = thresholds.model_copy(update={"max_others_cpu_share": None})
        section.notes.append(
            "processor time of other programs is not judged: the system measured is one of them"
        )
    section.thresholds = thresholds
    declare(thresholds)
    credit = await padding_credit(options, deployments, notify)

    def keep(level: Level) -> None:
        section.levels.append(level)
        record.save()

    async with up(options, deployments, notify, peers=peers) as stage:
        section.conditions = stage.conditions
        system = stage.systems[0]
        prompts = stage.workload.prompts
        for pacing in options.pacings:
            arms: list[Arm] = [
                SystemArm(SPECULATIVE, system, options.settings, None),
                SystemArm(TARGET_ONLY, system, options.settings, 0),
                *_peers_at(pacing, stage.peers, section),
            ]
            plan = plan_level(
                pacing,
                len(prompts),
                options.num_pairs,
                options.requests_per_wave,
                credit.get(pacing.concurrency or 1),
            )
            await run_level(arms, prompts, plan, keep, notify)
        ratio = memory_ratio(models_of(stage))
    section.decision = decide(section.levels, thresholds, ratio)
    section.complete = True


def declare(thresholds: Thresholds) -> None:
    """Print what will be judged, before anything is measured."""
    values = thresholds.model_dump()
    judged = ", ".join(f"{name} {value:g}" for name, value in values.items() if value is not None)
    say(f"declared before the run: {judged}")


async def padding_credit(
    options: BenchOptions, deployments: Sequence[Deployment], notify: Notify
) -> dict[int, float]:
    """Time padded steps of the target alone, by concurrency; empty when that is not wanted."""
    deployment = next(iter(deployments), None)
    if deployment is None or deployment.speculative is None or not options.padding:
        return {}
    notify("timing padded steps", 0.0)
    counts = sorted({pacing.concurrency or 1 for pacing in options.pacings})
    rows = sorted({1, 2, 1 + deployment.speculative.num_speculative_tokens})
    engine = options.engine.model_copy(update={"model": deployment.target})
    steps = await measure_padding(engine, counts, rows)
    notify("timing padded steps", 1.0)
    return {count: each.credit for count, each in steps.items()}


def memory_ratio(models: Sequence[ModelFacts]) -> float | None:
    """Return weights and KV with the draft over those of the target; None when unknown."""
    sizes = {model.role: model.weights_bytes + model.kv_cache_bytes for model in models}
    target = sizes.get("target", 0)
    return sum(sizes.values()) / target if target else None


def _peers_at(pacing: Pacing, peers: Sequence[PeerArm], section: Section) -> list[PeerArm]:
    """Leave out the peers that cannot take the load, and say so."""
    able = []
    if pacing.arrival_rate is not None:
        section.notes.append(
            f"{pacing}: both sides bring as many tokens/s as arrive; min_speedup is judged by the "
            "median time of a request, end to end"
        )
    for peer in peers:
        if pacing.concurrency is None:
            section.notes.append(f"{peer.name} is left out at {pacing}: it takes no arrivals")
        elif pacing.concurrency > 1 and not peer.spec.is_vllm:
            section.notes.append(
                f"{peer.name} is left out at {pacing}: it decodes one prompt at a time"
            )
        else:
            able.append(peer)
    return able
