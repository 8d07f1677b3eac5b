"""`specserve bench --suite auto`: automatic length control against the better of on and off.

One target and one draft serve three orchestrators by turns, on the same prompts: one whose K is
dynamic, and two that are switched on and off. (Two deployments that are alike differ by some per
cent, by where their weights lie in memory, which is as much as is asked about here; what always on
and always off show is not for the dynamic one to learn from; and whoever waits longer for its turn
begins it colder.) The better fixed side is the one
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
from specserve.tools.bench.clients import RequestSettings
from specserve.tools.bench.deployment import Deployment, Running, SystemArm, Twin
from specserve.tools.bench.level import Arm, Level, Notify, run_level
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.record import AutoResult, Record
from specserve.tools.bench.sample import BenchPrompt, Wave
from specserve.tools.bench.stage import up
from specserve.tools.bench.workload import plan_level
from specserve.tools.load.arrivals import Pacing
from specserve.tools.terminal import say

AUTO = "auto"
ALWAYS_ON = "always-on"
ALWAYS_OFF = "always-off"
LEAST_REQUESTS = 6
"""Of a side in one pair."""


async def run_auto(options: BenchOptions, record: Record, notify: Notify) -> None:
    """Measure every level."""
    if not options.starts_services:
        raise ConfigurationError("--suite auto: it starts services of its own; leave out --url")
    if any(pacing.concurrency is None for pacing in options.pacings):
        raise ConfigurationError("--suite auto: --concurrency was wanted, not --arrival-rate")
    least = options.thresholds.min_dynamic_ratio
    section = record.section("auto")
    section.thresholds = options.thresholds
    say(f"declared before the run: min_dynamic_ratio {least:g}")

    def keep(level: Level) -> None:
        section.levels.append(level)
        section.auto.append(auto_result(level))
        record.save()

    async with up(options, [dynamic(options)], notify) as stage:
        section.conditions = stage.conditions
        arms = arms_of(stage.systems[0], options.settings)
        prompts = stage.workload.prompts
        for pacing in options.pacings:
            per_wave = options.requests_per_wave or requests_per_wave(pacing)
            plan = plan_level(pacing, len(prompts), options.num_pairs, per_wave)
            await run_level(arms, prompts, replace(plan, num_unmeasured=1), keep, notify)
    section.complete = True


def requests_per_wave(pacing: Pacing) -> int:
    """Return how many requests a side runs in one pair.

    One prompt alone says little: how well it is guessed differs from one to the next.
    """
    at_once = pacing.concurrency or 1
    return at_once * -(-LEAST_REQUESTS // at_once)


def arms_of(system: Running, settings: RequestSettings) -> list[Arm]:
    """Return the three sides of a deployment that has two twins."""
    modes = {ALWAYS_ON: SpeculationMode.ON, ALWAYS_OFF: SpeculationMode.OFF}
    arms: list[Arm] = [SystemArm(AUTO, system, settings)]
    for (name, mode), twin in zip(modes.items(), system.twins, strict=True):
        fixed = replace(system, client=twin.client)
        arms.append(SwitchedArm(SystemArm(name, fixed, settings), twin, mode))
    return arms


@dataclass(frozen=True, slots=True)
class SwitchedArm:
    """A side whose orchestrator is switched before each wave."""

    arm: SystemArm
    twin: Twin
    mode: SpeculationMode

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
        await self.twin.switch(self.mode)
        return await self.arm.run(prompts, pacing, label)


def dynamic(options: BenchOptions) -> Deployment:
    """Describe the deployment, whose K is dynamic.

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
    return replace(options.deployment("dynamic K", speculative), num_twins=2)


def changed(base: SpeculativeConfig, keys: str) -> SpeculativeConfig:
    """Return a speculative configuration with other keys, given as a JSON object.

    Raises:
        ConfigurationError: a key is unknown.
    """
    # What was set is kept, a default's value too: the embedded pair has defaults of its own.
    values = base.model_dump(exclude_unset=True)
    return parse_speculative_config(json.dumps(values | json.loads(keys)))


def auto_result(level: Level) -> AutoResult:
    """Compare auto with the better fixed side of a level."""
    fixed = [arm for name in (ALWAYS_ON, ALWAYS_OFF) if (arm := level.arm(name)) is not None]
    best = max(fixed, key=lambda arm: arm.summary.tokens_per_s)
    comparison = level.comparison(AUTO, best.name)
    return AutoResult(
        str(level.pacing), best.name, None if comparison is None else comparison.ratio
    )
