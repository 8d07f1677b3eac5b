"""The tables of a report, as header and rows of text: one source for the terminal and for HTML.

Pure: a record's values in, text cells out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specserve.tools.bench.decision import Decision
from specserve.tools.bench.level import Comparison, Level
from specserve.tools.bench.record import AutoResult, MethodResult, SweepStep
from specserve.tools.bench.statistics import Interval, Quantiles
from specserve.tools.bench.summary import Acceptance


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def throughput(level: Level) -> Table:
    """Rates and counts, one row a side."""
    header = (
        "side", "requests", "failed", "tokens/s", "tokens/min", "requests/s", "prompt", "output",
        "batch", "KV blocks",
    )  # fmt: skip
    rows = []
    for arm in level.arms:
        each = arm.summary
        rows.append(
            (
                arm.name,
                str(each.num_requests),
                str(each.num_failed),
                f"{each.tokens_per_s:.2f}",
                f"{each.tokens_per_minute:.0f}",
                f"{each.requests_per_s:.3f}",
                _lengths(each.prompt_length),
                _lengths(each.output_length),
                _lengths(each.batch_size),
                named(each.kv_blocks_peak) or "-",
            )
        )
    return Table(
        "Rates; prompt, output, batch: median / largest; KV blocks: most in use",
        header,
        tuple(rows),
    )


def latencies(level: Level) -> Table:
    """Latencies in milliseconds, one row a side."""
    header = ("side", "TTFT", "ITL", "TPOT", "E2E", "pause between blocks")
    rows = [
        (
            arm.name,
            milliseconds(arm.summary.ttft_s),
            milliseconds(arm.summary.itl_s),
            milliseconds(arm.summary.tpot_s),
            milliseconds(arm.summary.e2e_s),
            milliseconds(arm.summary.block_gap_s),
        )
        for arm in level.arms
    ]
    return Table("Latency in ms, p50 / p95 / p99", header, tuple(rows))


def comparisons(level: Level) -> Table:
    """Ratios of tokens/s with their intervals, one row a pair of sides."""
    header = ("left / right", "ratio", "95 % interval", "pairs", "first half", "second half")
    rows = [
        (
            f"{each.left} / {each.right}",
            "-" if each.ratio is None else f"{each.ratio.value:.3f}",
            between(each.ratio),
            "0" if each.ratio is None else str(each.ratio.count),
            *_halves(each),
        )
        for each in level.comparisons
    ]
    return Table("Tokens/s, pair by pair", header, tuple(rows))


def acceptance(level: Level) -> Table:
    """What speculation did, one row a side that speculates."""
    header = (
        "side", "acceptance length", "tokens/round", "accepted", "drafted", "by position",
        "recovered", "bonus", "plain", "late",
    )  # fmt: skip
    rows = []
    for arm in level.arms:
        each = arm.summary.acceptance
        if each is None:
            continue
        origins = arm.summary.tokens_by_origin
        rows.append(
            (
                arm.name,
                number(each.mean_acceptance_length),
                f"{each.tokens_per_round:.3f}",
                str(each.num_accepted_tokens),
                str(each.num_draft_tokens),
                " ".join(f"{position.rate:.2f}" for position in each.by_position) or "-",
                *(str(origins.get(name, 0)) for name in ("recovered", "bonus", "plain")),
                str(each.num_late_proposals),
            )
        )
    return Table("Speculation", header, tuple(rows))


def stages(level: Level) -> Table:
    """Time by stage of the round, one row a side and stage."""
    header = ("side", "stage", "ms a round", "share of E2E")
    rows = [
        (arm.name, stage.name, f"{stage.ms_per_round:.3f}", f"{100 * stage.share_of_e2e:.1f} %")
        for arm in level.arms
        for stage in arm.summary.stages
        if stage.total_s > 0
    ]
    return Table("Stages", header, tuple(rows))


def categories(level: Level) -> Table:
    """One row a category: every side's tokens/s, and the first side's acceptance length."""
    names = dict.fromkeys(c.category for arm in level.arms for c in arm.summary.categories)
    header = ("category", "requests", *(arm.name for arm in level.arms), "acceptance length")
    rows = []
    for name in names:
        cells = {
            arm.name: next((c for c in arm.summary.categories if c.category == name), None)
            for arm in level.arms
        }
        first = cells[level.arms[0].name]
        rows.append(
            (
                name,
                str(0 if first is None else first.num_requests),
                *("-" if cell is None else f"{cell.tokens_per_s:.2f}" for cell in cells.values()),
                number(None if first is None else first.mean_acceptance_length),
            )
        )
    return Table("A request's own tokens/s by category", header, tuple(rows))


def decision(matrix: Decision) -> Table:
    """The decision matrix: one row a level, one column a threshold."""
    checks = matrix.levels[0].checks if matrix.levels else ()
    limits = [f"{check.name} {check.limit:g}" for check in checks]
    rows = [
        (
            row.level,
            row.verdict,
            *(f"{'✓' if check.holds else '✗'} {number(check.value)}" for check in row.checks),
        )
        for row in matrix.levels
    ]
    return Table("Decision matrix", ("level", "verdict", *limits), tuple(rows))


def methods(results: Sequence[MethodResult]) -> Table:
    """Mean acceptance length: one row a category, one column a method."""
    names = dict.fromkeys(c.category for result in results for c in result.summary.categories)
    rows = []
    for name in names:
        found = [
            next((c for c in result.summary.categories if c.category == name), None)
            for result in results
        ]
        cells = (None if c is None else c.mean_acceptance_length for c in found)
        rows.append((name, *map(number, cells)))
    rows.append(("overall", *(number(r.summary.mean_acceptance_length) for r in results)))
    counted: dict[str, Callable[[Acceptance], str]] = {
        "tokens/round": lambda a: f"{a.tokens_per_round:.3f}",
        "acceptance rate": lambda a: f"{a.acceptance_rate:.3f}",
        "rounds with a draft": lambda a: str(a.num_drafts),
        "rounds without": lambda a: str(a.num_plain_steps),
    }
    for title, write in counted.items():
        overall = (result.summary.acceptance for result in results)
        rows.append((title, *("-" if each is None else write(each) for each in overall)))
    counts = ((r.summary.num_failed, r.summary.num_requests) for r in results)
    rows.append(("failed requests", *(f"{failed} of {all_}" for failed, all_ in counts)))
    header = ("category", *(result.method for result in results))
    return Table("Mean acceptance length (1 + accepted / drafts)", header, tuple(rows))


def auto(results: Sequence[AutoResult]) -> Table:
    """Automatic length control against the better of on and off, one row a level."""
    rows = [
        (each.level, each.best, "-" if each.ratio is None else f"{each.ratio.value:.3f}",
         between(each.ratio), "0" if each.ratio is None else str(each.ratio.count))
        for each in results
    ]  # fmt: skip
    header = ("level", "better fixed side", "auto / it", "95 % interval", "pairs")
    return Table("Automatic length control", header, tuple(rows))


def sweep(steps: Sequence[SweepStep]) -> Table:
    """The walk over settings, one row a step."""
    rows = [
        (
            step.stage,
            str(step.setting),
            f"{step.tokens_per_s:.2f}",
            "-" if step.ratio is None else f"{step.ratio.value:.3f} {between(step.ratio)}",
            "verified" if step.verified else "returned",
            str(step.kept),
            step.reason,
        )
        for step in steps
    ]
    header = ("stage", "tried", "tokens/s", "over the last", "outcome", "kept", "why")
    return Table("Sweep", header, tuple(rows))


def number(value: float | None) -> str:
    """Write a ratio or a length; a dash for what was not measured."""
    return "-" if value is None else f"{value:.3f}"


def between(interval: Interval | None) -> str:
    """Write an interval's ends."""
    if interval is None or interval.low is None or interval.high is None:
        return "-"
    return f"[{interval.low:.3f}, {interval.high:.3f}]"


def milliseconds(values: Quantiles | None) -> str:
    """Write p50, p95 and p99 of times."""
    if values is None:
        return "-"
    return " / ".join(f"{1e3 * value:.1f}" for value in (values.p50, values.p95, values.p99))


def _lengths(values: Quantiles | None) -> str:
    return "-" if values is None else f"{values.p50:.0f} / {values.largest:.0f}"


def _halves(comparison: Comparison) -> tuple[str, str]:
    if comparison.halves is None:
        return ("-", "-")
    first, second = comparison.halves
    return (f"{first:.3f}", f"{second:.3f}")


def named(values: dict[str, str] | dict[str, int]) -> str:
    """Write names and their values in one line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
