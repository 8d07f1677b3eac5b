"""`specserve bench --suite auto`: automatic length control against the better of on and off.

One deployment is switched between its three ways, as `specserve speculation` does it, and they take
turns on the same prompts. (Two deployments that are alike differ by some per cent, by where their
weights lie in memory, which is as much as is asked about here.) The better fixed side is the one
with more tokens/s over the level. A level's first pair is not measured: what a change of load costs
is another question.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specserve.config import SpeculativeConfig
from specserve.config_parsing import parse_speculative_config
from specserve.errors import ConfigurationError
from specserve.speculation.length_choice import SpeculationMode
from specserve.tools.bench.deployment import Deployment, Running, SystemArm
from specserve.tools.bench.level import Arm, Level, Notify, run_level
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.record import AutoResult, Record
from specserve.tools.bench.sample import BenchPrompt, Wave
from specserve.tools.bench.serving import declare
from specserve.tools.bench.stage import up
from specserve.tools.bench.workload import plan_level
from specserve.tools.load.arrivals import Pacing

AUTO = "auto"
ALWAYS_ON = "always-on"
ALWAYS_OFF = "always-off"
MODES = {
    AUTO: SpeculationMode.AUTO,
    ALWAYS_ON: SpeculationMode.ON,
    ALWAYS_OFF: SpeculationMode.OFF,
}

LEAST_REQUESTS = 6
"""Of a side in one pair."""


async def run_auto(options: BenchOptions, record: Record, notify: Notify) -> None:
    """Measure every level."""
    if not options.starts_services:
        raise ConfigurationError("--suite auto: it starts services of its own; leave out --url")
    section = record.section("auto")
    section.thresholds = options.thresholds
    declare(options.thresholds)

    def keep(level: Level) -> None:
        section.levels.append(level)
        section.auto.append(auto_result(level))
        record.save()

    async with up(options, [dynamic(options)], notify) as stage:
        section.conditions = stage.conditions
        arms: list[Arm] = [
            SwitchedArm(stage.systems[0], mode, SystemArm(name, stage.systems[0], options.settings))
            for name, mode in MODES.items()
        ]
        prompts = stage.workload.prompts
        for pacing in options.pacings:
            per_wave = options.requests_per_wave or requests_per_wave(pacing)
            plan = plan_level(pacing, len(prompts), options.num_pairs, per_wave)
            await run_level(arms, prompts, replace(plan, num_unmeasured=1), keep, notify)
    section.complete = True


def requests_per_wave(pacing: Pacing) -> int | None:
    """Return how many requests a side runs in one pair; None takes all prompts.

    One prompt alone says little: how well it is guessed differs from one to the next.
    """
    if pacing.concurrency is None:
        return None
    return pacing.concurrency * -(-LEAST_REQUESTS // pacing.concurrency)


@dataclass(frozen=True, slots=True)
class SwitchedArm:
    """A deployment whose speculation is switched before each wave."""

    system: Running
    mode: SpeculationMode
    arm: SystemArm

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.arm.name

    @property
    def deployment(self) -> str:
        """Name of the deployment."""
        return self.arm.deployment

    @property
    def num_speculative_tokens(self) -> int | None:
        """None: the mode says it."""
        return None

    async def run(self, prompts: Sequence[BenchPrompt], pacing: Pacing, label: str) -> Wave:
        """Switch, decode the prompts and measure them."""
        await self.system.switch(self.mode)
        return await self.arm.run(prompts, pacing, label)


def dynamic(options: BenchOptions) -> Deployment:
    """Describe the deployment, whose K is dynamic until it is switched.

    Raises:
        ConfigurationError: a key is unknown, or K follows a table however it is switched.
    """
    base = options.deployment("dynamic K").speculative or SpeculativeConfig()
    speculative = changed(base, options.auto_config)
    if speculative.num_speculative_tokens_per_batch_size:
        raise ConfigurationError(
            "--suite auto: num_speculative_tokens_per_batch_size says K, on and auto alike; "
            "leave it out"
        )
    return options.deployment("dynamic K", speculative)


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
