"""`specserve bench --suite auto`: automatic length control against the better of on and off.

Three sides take turns on the same prompts: a deployment whose K is dynamic, the same with
speculation off request by request, and one with K fixed. (Two deployments that are alike differ by
some per cent, by where their weights lie in memory: so off is not measured on the other one.) The
better fixed side is the one with more tokens/s over the level. A level's first pair is not
measured: what a change of load costs is another question.
"""

from __future__ import annotations

import json
from dataclasses import replace

from specserve.config import SpeculativeConfig
from specserve.config_parsing import parse_speculative_config
from specserve.errors import ConfigurationError
from specserve.tools.bench.deployment import Deployment, SystemArm
from specserve.tools.bench.level import Arm, Level, Notify, run_level
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.record import AutoResult, Record
from specserve.tools.bench.serving import declare
from specserve.tools.bench.stage import up
from specserve.tools.bench.workload import plan_level

AUTO = "auto"
ALWAYS_ON = "always-on"
ALWAYS_OFF = "always-off"


async def run_auto(options: BenchOptions, record: Record, notify: Notify) -> None:
    """Measure every level."""
    if not options.starts_services:
        raise ConfigurationError("--suite auto: it starts services of its own; leave out --url")
    deployments = dynamic_and_fixed(options)
    section = record.section("auto")
    section.thresholds = options.thresholds
    declare(options.thresholds)

    def keep(level: Level) -> None:
        section.levels.append(level)
        section.auto.append(auto_result(level))
        record.save()

    async with up(options, deployments, notify) as stage:
        section.conditions = stage.conditions
        dynamic, fixed = stage.systems
        arms: list[Arm] = [
            SystemArm(AUTO, dynamic, options.settings, None),
            SystemArm(ALWAYS_ON, fixed, options.settings, None),
            SystemArm(ALWAYS_OFF, dynamic, options.settings, 0),
        ]
        prompts = stage.workload.prompts
        for pacing in options.pacings:
            plan = plan_level(pacing, len(prompts), options.num_pairs, options.requests_per_wave)
            await run_level(arms, prompts, replace(plan, num_unmeasured=1), keep, notify)
    section.complete = True


def dynamic_and_fixed(options: BenchOptions) -> list[Deployment]:
    """Describe the deployment whose K is dynamic, and the one whose K is fixed.

    Raises:
        ConfigurationError: a key is unknown, or both are the same deployment.
    """
    base = options.deployment("fixed K").speculative or SpeculativeConfig()
    dynamic = options.deployment("dynamic K", changed(base, options.auto_config))
    fixed = options.deployment("fixed K", changed(base, options.static_config))
    if dynamic.speculative == fixed.speculative:
        raise ConfigurationError(
            "--auto-config: it changes nothing; the keys that make K dynamic were wanted"
        )
    return [dynamic, fixed]


def changed(base: SpeculativeConfig, keys: str) -> SpeculativeConfig:
    """Return a speculative configuration with other keys, given as a JSON object.

    Raises:
        ConfigurationError: a key is unknown.
    """
    values = base.model_dump(exclude_defaults=True)
    return parse_speculative_config(json.dumps(values | json.loads(keys)))


def auto_result(level: Level) -> AutoResult:
    """Compare auto with the better fixed side of a level."""
    fixed = [arm for name in (ALWAYS_ON, ALWAYS_OFF) if (arm := level.arm(name)) is not None]
    best = max(fixed, key=lambda arm: arm.summary.tokens_per_s)
    comparison = level.comparison(AUTO, best.name)
    return AutoResult(
        str(level.pacing), best.name, None if comparison is None else comparison.ratio
    )
