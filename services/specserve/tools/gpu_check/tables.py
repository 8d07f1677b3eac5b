"""A check's figures for people. Knows the stages' figures; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.tools.gpu_check.stages import StageReport
from specserve.tools.terminal import table


def report_table(reports: Sequence[StageReport]) -> str:
    """Lay out what every stage said, then its figures."""
    header = ("stage", "gate", "status", "s", "reason")
    rows = [
        (r.name, "yes" if r.is_gate else "", r.status.value, f"{r.seconds:.1f}", r.reason[:100])
        for r in reports
    ]
    parts = [table(header, rows)]
    for report in reports:
        if steps := _cells(report, "steps"):
            parts.append(f"{report.name}: ms (share of the memory's limit)\n{_step_table(steps)}")
        if rates := _cells(report, "rates"):
            parts.append(f"{report.name}\n{_rate_table(rates)}")
    return "\n\n".join(parts)


def _cells(report: StageReport, key: str) -> list[dict[str, object]]:
    cells = report.figures.get(key)
    return cells if isinstance(cells, list) else []


def _step_table(cells: Sequence[dict[str, object]]) -> str:
    rows = [
        (
            str(cell["model"]),
            str(cell["batch"]),
            str(cell["rows"]),
            _number(cell["forward_ms"]),
            _number(cell["step_ms"]),
            _number(cell["limit_ms"]),
            _number(_share(cell["limit_ms"], cell["step_ms"])),
        )
        for cell in cells
    ]
    header = ("model", "batch", "rows", "forward ms", "with sampling", "limit ms", "limit / step")
    return table(header, rows)


def _rate_table(cells: Sequence[dict[str, object]]) -> str:
    rows = [
        (
            str(cell["batch"]),
            str(cell["rule"]),
            str(cell["num_speculative_tokens"]),
            _number(cell["tokens_per_s"]),
            _number(cell["round_ms"]),
            _number(cell["overhead_ms"]),
            _number(cell["mean_acceptance_length"]),
        )
        for cell in cells
    ]
    header = ("batch", "rule", "K", "tokens/s", "round ms", "overhead ms", "tokens a round")
    return table(header, rows)


def _share(part: object, whole: object) -> float | None:
    if isinstance(part, float) and isinstance(whole, float) and whole:
        return part / whole
    return None


def _number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float | int) else "-"
