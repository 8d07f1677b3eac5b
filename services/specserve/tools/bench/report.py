"""A record for people: lines for the terminal, and one HTML page with plots.

Knows the record; knows no service. The plots are in `report_plots.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specserve.tools.bench import condition_rows, page
from specserve.tools.bench import rows as figure_rows
from specserve.tools.bench.decision import speedup
from specserve.tools.bench.figure_tables import overlap, tables_of
from specserve.tools.bench.level import Level
from specserve.tools.bench.record import Record, Section, write_text
from specserve.tools.bench.report_plots import (
    auto_plots,
    level_plots,
    method_plots,
    overview_plots,
    sweep_plots,
)
from specserve.tools.bench.rows import Table
from specserve.tools.terminal import table

LEVEL_TABLES: tuple[Callable[[Level], Table], ...] = (
    figure_rows.throughput,
    figure_rows.latencies,
    figure_rows.comparisons,
    figure_rows.acceptance,
    figure_rows.stages,
    figure_rows.categories,
)

_TERMS = (
    "TTFT: time to the first token. ITL: time between two blocks, shared out among the later one's "
    "tokens. TPOT: time per token after the first block. E2E: from when a request was due to its "
    "last token. Mean acceptance length: tokens per round that verified a draft, the recovered or "
    "bonus token included. Ratios are of tokens/s, with Student's 95 % interval over the pairs."
)


def text_of(record: Record) -> str:
    """Write a record for the terminal."""
    lines: list[str] = []
    for section in record.sections:
        for shown in _section_tables(section):
            lines += _titled(shown)
        for level in section.levels:
            if section.suite != "sweep":
                lines += ["", f"--- {level.pacing}: {_level_line(level)}"]
                for make in LEVEL_TABLES:
                    lines += _titled(make(level))
        lines += [f"note: {note}" for note in (*section.notes, *_errors(section))]
        if not section.complete:
            lines.append(f"{section.suite}: cut short; what was measured is kept")
        if section.chosen is not None:
            lines.append(f"last verified setting: {section.chosen}")
        if section.decision is not None:
            lines += _titled(figure_rows.decision(section.decision))
            lines += [
                f"{row.level}: {row.verdict}" + (f" ({'; '.join(row.reasons)})" * bool(row.reasons))
                for row in section.decision.levels
            ]
            lines.append(f"decision: {section.decision.verdict}")
    lines += _titled(overlap(record.figures))  # other figures were printed as they came
    return "\n".join(lines).strip("\n")


def html_of(record: Record) -> str:
    """Write a record as one page that needs nothing else."""
    parts = [
        page.heading(1, "specserve benchmark"),
        page.paragraph(f"{record.created_at}   {record.command}", "faint"),
    ]
    if not record.complete:
        parts.append(page.paragraph("Cut short: what was measured until then.", "unsure"))
    for section in record.sections:
        parts += _section_html(section)
    for shown in tables_of(record.figures):
        parts += [page.heading(2, shown.title), page.table(shown.header, shown.rows)]
    return page.page("specserve benchmark", parts)


def write_html(record: Record, path: Path) -> None:
    """Write the page.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    write_text(path, html_of(record), "--report")


def _section_tables(section: Section) -> list[Table]:
    tables = []
    if section.methods:
        tables.append(figure_rows.methods(section.methods))
    if section.auto:
        tables.append(figure_rows.auto(section.auto))
    if section.steps:
        tables.append(figure_rows.sweep(section.steps))
    return tables


def _section_html(section: Section) -> list[str]:
    parts = [page.heading(2, f"Suite: {section.suite}")]
    if section.decision is not None:
        parts.append(page.verdict(section.decision.verdict))
        parts += [
            page.paragraph(f"{row.level}: {'; '.join(row.reasons)}")
            for row in section.decision.levels
            if row.reasons
        ]
        parts.append(_table(figure_rows.decision(section.decision)))
    if section.chosen is not None:
        parts.append(page.paragraph(f"Last verified setting: {section.chosen}."))
    notes = (*section.notes, *_errors(section))
    parts += [page.paragraph(note, "unsure") for note in notes]
    for drawn in (
        overview_plots(section),
        method_plots(section.methods),
        auto_plots(section.auto),
        sweep_plots(section.steps),
    ):
        parts.append(page.plots(drawn))
    parts += [_table(shown, is_text=bool(section.steps)) for shown in _section_tables(section)]
    for level in section.levels:
        title = str(level.pacing)
        if section.suite == "sweep":
            title = " against ".join(arm.name for arm in level.arms)
        parts += [
            page.heading(3, title[:1].upper() + title[1:]),
            page.paragraph(_level_line(level), "faint"),
            page.plots(level_plots(level)),
            *(_table(make(level)) for make in LEVEL_TABLES),
        ]
    if section.conditions is not None:
        parts += [
            page.heading(3, "Conditions"),
            _table(condition_rows.models(section.conditions)),
            _table(condition_rows.conditions_table(section.conditions), is_text=True),
            page.paragraph(_TERMS, "faint"),
        ]
    return parts


def _errors(section: Section) -> list[str]:
    """Say what requests failed of: they are in no other figure."""
    sides = [
        (f"{level.pacing}, {arm.name}", arm.summary)
        for level in section.levels
        for arm in level.arms
    ]
    sides += [(each.method, each.summary) for each in section.methods]
    return [
        f"{name}: {summary.num_failed} of {summary.num_requests} requests failed: {error}"
        for name, summary in sides
        for error in summary.errors
    ]


def _level_line(level: Level) -> str:
    """Say how a level was measured, and how quiet the machine was."""
    facts = [
        f"{level.num_pairs} pairs of {level.requests_per_wave} requests a side",
        f"other programs took {100 * level.others_cpu_share:.0f} % of the processors",
    ]
    if level.prompts_reused:
        facts.append("some prompts came again: what remembers answers gains from that")
    if level.padding_credit is not None:
        facts.append(f"padding would make target-only {level.padding_credit:.3f} times as fast")
        best = speedup(level)
        if best is not None and level.padding_credit > 1:
            facts.append(
                f"against that, speculation is {best.value:.3f} {figure_rows.between(best)}"
            )
    if not level.complete:
        facts.append("cut short")
    return "; ".join(facts)


def _titled(shown: Table) -> list[str]:
    return [shown.title, table(shown.header, shown.rows), ""] if shown.rows else []


def _table(shown: Table, *, is_text: bool = False) -> str:
    return page.table(shown.header, shown.rows, shown.title, is_text=is_text)
