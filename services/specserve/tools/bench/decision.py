"""From measured levels and declared thresholds to a decision: enable, or keep target-only.

Pure: levels in, a decision matrix out. A level whose figures do not agree with themselves decides
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specserve.tools.bench.level import Level
from specserve.tools.bench.statistics import Interval, Quantiles
from specserve.tools.bench.summary import Summary
from specserve.tools.bench.thresholds import Thresholds

Verdict = Literal["enable", "keep target-only", "not comparable"]

SPECULATIVE = "speculative"
TARGET_ONLY = "target-only"


@dataclass(frozen=True, slots=True)
class Check:
    """One cell of the matrix."""

    name: str
    """Threshold's name."""
    value: float | None
    """What was measured; None when it could not be."""
    limit: float
    holds: bool


@dataclass(frozen=True, slots=True)
class LevelDecision:
    """One row of the matrix."""

    level: str
    verdict: Verdict
    checks: tuple[Check, ...]
    reasons: tuple[str, ...]
    """Why it is not `enable`, in words."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The whole matrix."""

    verdict: Verdict
    """enable when every level says so."""
    levels: tuple[LevelDecision, ...]


def decide(levels: Sequence[Level], thresholds: Thresholds, memory_ratio: float | None) -> Decision:
    """Judge every level that has both sides.

    Args:
        memory_ratio: weights and KV with a draft over those without; None when unknown.
    """
    rows = tuple(
        _judge(level, thresholds, memory_ratio)
        for level in levels
        if level.comparison(SPECULATIVE, TARGET_ONLY) is not None
    )
    verdicts = {row.verdict for row in rows}
    verdict: Verdict = "keep target-only"
    if verdicts == {"enable"}:
        verdict = "enable"
    elif "keep target-only" not in verdicts:
        verdict = "not comparable"
    return Decision(verdict, rows)


def speedup(level: Level) -> Interval | None:
    """Return speculative tokens/s over those of the best target-only, padded steps included."""
    comparison = level.comparison(SPECULATIVE, TARGET_ONLY)
    if comparison is None or comparison.ratio is None:
        return None
    return comparison.ratio.divided_by(level.padding_credit or 1.0)


def not_comparable(level: Level, thresholds: Thresholds) -> tuple[str, ...]:
    """Say why a level's figures cannot be compared; empty when they can."""
    reasons = []
    if not level.complete:
        reasons.append("it was cut short")
    limit = thresholds.max_others_cpu_share
    if limit is not None and level.others_cpu_share > limit:
        reasons.append(
            f"other programs took {100 * level.others_cpu_share:.0f} % of the processors "
            f"(at most {100 * limit:.0f} %)"
        )
    for comparison in level.comparisons:
        difference = comparison.half_difference
        if difference is not None and difference > thresholds.max_half_difference:
            first, second = comparison.halves or (0.0, 0.0)
            reasons.append(
                f"{comparison.left} / {comparison.right} was {first:.3f} in the first half and "
                f"{second:.3f} in the second, {100 * difference:.0f} % apart "
                f"(at most {100 * thresholds.max_half_difference:.0f} %)"
            )
    return tuple(reasons)


def limits_passed(summary: Summary, thresholds: Thresholds) -> tuple[str, ...]:
    """Say which limits one side passes that need no other side to compare with."""
    measured = {
        "max_ttft_p95_s": _p95(summary.ttft_s),
        "max_tpot_p95_s": _p95(summary.tpot_s),
        "max_failed_share": failed_share(summary),
    }
    passed = []
    for name, value in measured.items():
        limit: float | None = getattr(thresholds, name)
        if limit is not None and (value is None or value > limit):
            passed.append(_why(Check(name, value, limit, holds=False)))
    return tuple(passed)


def _judge(level: Level, thresholds: Thresholds, memory_ratio: float | None) -> LevelDecision:
    left, right = level.arm(SPECULATIVE), level.arm(TARGET_ONLY)
    if left is None or right is None:
        raise ValueError("a level without both sides cannot be judged")
    on, off = left.summary, right.summary
    measured: dict[str, float | None] = {
        "min_speedup": _surely_faster(level, on, off),
        "max_ttft_p95_ratio": _ratio(on.ttft_s, off.ttft_s, "p95"),
        "max_tpot_p95_ratio": _ratio(on.tpot_s, off.tpot_s, "p95"),
        "max_e2e_p95_ratio": _ratio(on.e2e_s, off.e2e_s, "p95"),
        "max_itl_p99_ratio": _ratio(on.itl_s, off.itl_s, "p99"),
        "min_mean_acceptance_length": on.mean_acceptance_length,
        "max_memory_ratio": memory_ratio,
        "max_ttft_p95_s": _p95(on.ttft_s),
        "max_tpot_p95_s": _p95(on.tpot_s),
        "max_failed_share": max(failed_share(on), failed_share(off)),
    }
    checks = []
    for name, value in measured.items():
        limit: float | None = getattr(thresholds, name)
        if limit is None:
            continue
        holds = value is not None and (value >= limit if name[:3] == "min" else value <= limit)
        checks.append(Check(name, value, limit, holds))
    reasons = not_comparable(level, thresholds)
    verdict: Verdict = "enable"
    if reasons:
        verdict = "not comparable"
    elif not all(check.holds for check in checks):
        verdict = "keep target-only"
        reasons = tuple(_why(check) for check in checks if not check.holds)
    return LevelDecision(str(level.pacing), verdict, tuple(checks), reasons)


def _surely_faster(level: Level, on: Summary, off: Summary) -> float | None:
    """Return the speedup that is judged.

    In open loop tokens/s are those that arrive: there it is the median time of a request.
    """
    if level.pacing.arrival_rate is not None:
        return _ratio(off.e2e_s, on.e2e_s, "p50")
    best = speedup(level)
    return None if best is None else best.low


def _ratio(on: Quantiles | None, off: Quantiles | None, quantile: str) -> float | None:
    if on is None or off is None:
        return None
    below: float = getattr(off, quantile)
    return float(getattr(on, quantile)) / below if below > 0 else None


def _p95(values: Quantiles | None) -> float | None:
    return None if values is None else values.p95


def failed_share(summary: Summary) -> float:
    """Return failed requests over all; 1 where there were none."""
    return summary.num_failed / summary.num_requests if summary.num_requests else 1.0


def _why(check: Check) -> str:
    shown = "not measured" if check.value is None else f"{check.value:.3f}"
    return f"{check.name} {check.limit:g}: {shown}"
