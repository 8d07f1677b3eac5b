"""Which plots a report has: from a record's values to drawn rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.tools.bench.decision import SPECULATIVE, TARGET_ONLY, speedup
from specserve.tools.bench.level import Level
from specserve.tools.bench.plots import Bar, Range, Whisker, bars, ranges, whiskers
from specserve.tools.bench.record import AutoResult, MethodResult, Section, SweepStep
from specserve.tools.bench.statistics import Quantiles

Drawn = list[tuple[str, str]]
"""(SVG, caption) of each plot."""

_SIDES = (
    SPECULATIVE,
    TARGET_ONLY,
    "transformers",
    "transformers-speculative",
    "vllm",
    "vllm-speculative",
)

LATENCIES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"))


def overview_plots(section: Section) -> Drawn:
    """Plot tokens/s and the speedup over the levels."""
    if not section.levels or section.suite != "serving":
        return []
    drawn = [(_rates(level), "") for level in section.levels]
    ratios = [
        Whisker(str(level.pacing), best.value, best.low, best.high)
        for level in section.levels
        if (best := speedup(level)) is not None
    ]
    if ratios:
        limit = section.thresholds and section.thresholds.min_speedup
        lines = [(1.0, "one"), *([(limit, "limit")] if limit else [])]
        caption = f"{SPECULATIVE} over the best {TARGET_ONLY}, 95 % interval"
        if limit:
            caption += f"; dashed: the threshold of {limit:g}"
        drawn.append((whiskers("Speedup", ratios, lines), caption))
    return drawn


def level_plots(level: Level) -> Drawn:
    """Plot latencies, acceptance by position, stages and ratios of one level."""
    drawn: Drawn = []
    for name, title in LATENCIES:
        rows = [
            Range(arm.name, in_ms(found), _ms(found), _colour(arm.name, i))
            for i, arm in enumerate(level.arms)
            if (found := _quantiles(arm.summary, name)) is not None
        ]
        if rows:
            drawn.append((ranges(f"{title}, ms", rows), "p50 (large), p95, p99"))
    ratios = [
        Whisker(
            f"{each.left} / {each.right}",
            each.ratio.value,
            each.ratio.low,
            each.ratio.high,
            _colour(each.left, 0),
        )
        for each in level.comparisons
        if each.ratio is not None
    ]
    if ratios:
        drawn.append((whiskers("Tokens/s, ratio", ratios, [(1.0, "one")]), "95 % intervals"))
    for i, arm in enumerate(level.arms):
        accepted = arm.summary.acceptance
        if accepted is not None and accepted.by_position:
            rows_at = [
                Bar(f"position {at + 1}", each.rate, f"{each.rate:.3f}", _colour(arm.name, i))
                for at, each in enumerate(accepted.by_position)
            ]
            drawn.append((bars(f"Accepted by position: {arm.name}", rows_at), ""))
        shares = [
            Bar(
                stage.name,
                stage.ms_per_round,
                f"{stage.ms_per_round:.2f} ms",
                _colour(arm.name, i),
            )
            for stage in arm.summary.stages
            if stage.total_s > 0
        ]
        if shares:
            drawn.append((bars(f"Stages, ms a round: {arm.name}", shares), ""))
    return drawn


def method_plots(results: Sequence[MethodResult]) -> Drawn:
    """Plot mean acceptance lengths, one plot a category and one overall."""
    if not results:
        return []
    names = dict.fromkeys(c.category for result in results for c in result.summary.categories)
    drawn = []
    for name in ["overall", *names]:
        rows = []
        for i, result in enumerate(results):
            own = result.summary.mean_acceptance_length
            if name != "overall":
                found = [c for c in result.summary.categories if c.category == name]
                own = found[0].mean_acceptance_length if found else None
            rows.append(Bar(result.method, own or 0.0, "-" if own is None else f"{own:.3f}", i))
        drawn.append((bars(f"Mean acceptance length: {name}", rows), ""))
    return drawn


def auto_plots(results: Sequence[AutoResult]) -> Drawn:
    """Plot automatic length control over the better fixed side, one row a level."""
    rows = [
        Whisker(
            f"{each.level} (over {each.best})", each.ratio.value, each.ratio.low, each.ratio.high
        )
        for each in results
        if each.ratio is not None
    ]
    if not rows:
        return []
    caption = "tokens/s, 95 % interval; dashed: 3 % below"
    return [(whiskers("Auto / best of on and off", rows, [(1.0, "one"), (0.97, "limit")]), caption)]


def sweep_plots(steps: Sequence[SweepStep]) -> Drawn:
    """Plot the tokens/s of every setting that was tried."""
    rows = [
        Bar(
            str(step.setting),
            step.tokens_per_s,
            _rate(step.tokens_per_s),
            2 if step.verified else 5,
        )
        for step in steps
    ]
    return [(bars("Tokens/s by setting", rows), "grey: returned from")] if rows else []


def _rates(level: Level) -> str:
    rows = [
        Bar(arm.name, speed, f"{speed:.1f}", _colour(arm.name, i))
        for i, arm in enumerate(level.arms)
        for speed in (arm.summary.tokens_per_s,)
    ]
    return bars(f"Tokens/s, {level.pacing}", rows)


def _colour(name: str, otherwise: int) -> int:
    """Give a side the same colour wherever it is drawn."""
    return _SIDES.index(name) if name in _SIDES else otherwise


def _quantiles(summary: object, name: str) -> Quantiles | None:
    found: Quantiles | None = getattr(summary, name)
    return found


def in_ms(values: Quantiles) -> tuple[float, ...]:
    """Return p50, p95 and p99 in milliseconds."""
    return tuple(1e3 * value for value in (values.p50, values.p95, values.p99))


def _rate(value: float) -> str:
    return f"{value:.1f}"


def _ms(values: Quantiles) -> str:
    return f"{1e3 * values.p50:.1f} / {1e3 * values.p99:.1f}"
