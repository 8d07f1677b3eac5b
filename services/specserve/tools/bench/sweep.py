"""`specserve bench --suite sweep`: concurrency first, then fixed K, then dynamic K.

One thing changes at a time. A step that fails (requests fail, a limit is passed, the figures do not
agree with themselves, or nothing is gained) returns to the last verified setting.

`Sweep` decides and knows numbers alone; `run_sweep` brings the systems up and measures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from specserve.config import SpeculativeConfig
from specserve.errors import ConfigurationError
from specserve.tools.bench.auto import changed
from specserve.tools.bench.decision import limits_passed, not_comparable
from specserve.tools.bench.deployment import Deployment, SystemArm
from specserve.tools.bench.level import Arm, Level, Notify, run_level
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.record import Record, Setting, SweepStep
from specserve.tools.bench.serving import declare
from specserve.tools.bench.stage import up
from specserve.tools.bench.statistics import Interval
from specserve.tools.bench.thresholds import Thresholds
from specserve.tools.bench.workload import plan_level
from specserve.tools.load.arrivals import Pacing

CONCURRENCY = "concurrency"
FIXED_K = "fixed K"
DYNAMIC_K = "dynamic K"

MIN_GROWTH = 1.05
"""A higher concurrency must bring this much more tokens/s: past it only waiting grows."""

Measure = Callable[[Setting, Setting | None], Awaitable[Level]]
"""Measures a setting, in pairs with another unless that is None; names sides as settings read."""


@dataclass(slots=True)
class Sweep:
    """The walk over settings."""

    thresholds: Thresholds
    measure: Measure
    keep: Callable[[SweepStep], None]

    async def run(
        self, concurrencies: Sequence[int], k_values: Sequence[int], dynamic_k: int
    ) -> Setting | None:
        """Return the last verified setting; None when not even the first concurrency works.

        Args:
            dynamic_k: the most that dynamic K may choose; 0 leaves that stage out.
        """
        setting = await self._raise_concurrency(concurrencies)
        if setting is None:
            return None
        for k in k_values:
            tried = replace(setting, num_speculative_tokens=k)
            setting = await self._compare(FIXED_K, tried, setting)
        if dynamic_k:
            tried = replace(setting, num_speculative_tokens=dynamic_k, dynamic=True)
            setting = await self._compare(DYNAMIC_K, tried, setting)
        return setting

    async def _raise_concurrency(self, concurrencies: Sequence[int]) -> Setting | None:
        verified: Setting | None = None
        best = 0.0
        for concurrency in concurrencies:
            tried = Setting(concurrency, 0)
            level = await self.measure(tried, None)
            reached = level.arms[0].summary.tokens_per_s
            reasons = self._faults(level)
            if not reasons and reached < MIN_GROWTH * best:
                reasons = [f"{reached:.1f} tokens/s, no more than {best:.1f} before"]
            if not reasons:
                verified, best = tried, reached
            self._note(CONCURRENCY, tried, level, None, reasons, verified or tried)
            if reasons:
                break
        return verified

    async def _compare(self, stage: str, tried: Setting, last: Setting) -> Setting:
        """Try a setting against the last verified one; return the one to go on with."""
        level = await self.measure(tried, last)
        comparison = level.comparison(str(tried), str(last))
        ratio = None if comparison is None else comparison.ratio
        reasons = self._faults(level)
        floor = self.thresholds.min_dynamic_ratio
        if ratio is None or ratio.low is None:
            reasons.append("too few pairs to tell")
        elif stage == FIXED_K and ratio.low <= 1:
            reasons.append(f"not surely faster: {ratio.value:.3f}, at least {ratio.low:.3f}")
        elif stage == DYNAMIC_K and ratio.value < floor:
            reasons.append(f"slower: {ratio.value:.3f}, at least {floor:g} was wanted")
        kept = last if reasons else tried
        self._note(stage, tried, level, ratio, reasons, kept)
        return kept

    def _faults(self, level: Level) -> list[str]:
        """Say what is wrong with the setting that was tried, whatever its speed."""
        summary = level.arms[0].summary
        return [*not_comparable(level, self.thresholds), *limits_passed(summary, self.thresholds)]

    def _note(
        self,
        stage: str,
        tried: Setting,
        level: Level,
        ratio: Interval | None,
        reasons: Sequence[str],
        kept: Setting,
    ) -> None:
        speed = level.arms[0].summary.tokens_per_s
        self.keep(SweepStep(stage, tried, speed, ratio, not reasons, "; ".join(reasons), kept))


async def run_sweep(options: BenchOptions, record: Record, notify: Notify) -> None:
    """Walk over the settings of one deployment with fixed K, and one with dynamic K."""
    if not options.starts_services:
        raise ConfigurationError("--suite sweep: it starts services of its own; leave out --url")
    concurrencies = [pacing.concurrency for pacing in options.pacings if pacing.concurrency]
    if not concurrencies:
        raise ConfigurationError("--suite sweep: --concurrency was wanted, not --arrival-rate")
    deployments, dynamic_k = _deployments(options)
    section = record.section("sweep")
    section.thresholds = options.thresholds
    declare(options.thresholds)

    def keep(step: SweepStep) -> None:
        section.steps.append(step)
        record.save()

    async with up(options, deployments, notify) as stage:
        section.conditions = stage.conditions
        prompts = stage.workload.prompts

        async def measure(setting: Setting, last: Setting | None) -> Level:
            arms: list[Arm] = []
            for each in (setting, *([last] if last is not None else [])):
                system = stage.systems[1 if each.dynamic else 0]
                k = None if each.dynamic else each.num_speculative_tokens
                arms.append(SystemArm(str(each), system, options.settings, k))
            pacing = Pacing(concurrency=setting.concurrency)
            plan = plan_level(pacing, len(prompts), options.num_pairs, options.requests_per_wave)
            label = f"{len(section.levels)}-"
            return await run_level(arms, prompts, plan, section.levels.append, notify, label=label)

        sweep = Sweep(options.thresholds, measure, keep)
        section.chosen = await sweep.run(concurrencies, options.k_values, dynamic_k)
    section.complete = True


def _deployments(options: BenchOptions) -> tuple[list[Deployment], int]:
    """Describe the deployment of fixed K, and that of dynamic K.

    Returns:
        The deployments, and the most that dynamic K may choose.
    """
    base = options.deployment("fixed K").speculative or SpeculativeConfig()
    most = max(options.k_values, default=base.num_speculative_tokens)
    base = base.model_copy(update={"num_speculative_tokens": most})
    fixed = options.deployment("fixed K", changed(base, options.static_config))
    dynamic = options.deployment("dynamic K", changed(base, options.auto_config))
    return [fixed, dynamic], most
