"""The record of a load run, as JSON, as lines for the terminal and as one HTML page.

Knows the values; knows no service.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from specserve.tools.bench import page
from specserve.tools.bench.condition_rows import conditions_table, models
from specserve.tools.bench.conditions import Conditions
from specserve.tools.bench.plots import Bar, Range, bars, ranges
from specserve.tools.bench.record import write_text
from specserve.tools.bench.report_plots import LATENCIES, in_ms
from specserve.tools.bench.rows import Table, milliseconds
from specserve.tools.bench.statistics import Quantiles
from specserve.tools.load.run import MAX_CLIENT_LATE_S, LoadPlan, LoadStep
from specserve.tools.load.slo import Objectives
from specserve.tools.terminal import table

SCHEMA = "specserve-load"
SCHEMA_VERSION = 1
"""Rises when a field changes its meaning or goes away."""


@dataclass(slots=True)
class LoadRecord:
    """One run of `specserve load`."""

    command: str
    objectives: Objectives
    wanted_share: float
    """Of requests that must meet every objective."""
    path: Path | None = None
    """Where the JSON goes; None keeps it in memory."""
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    conditions: Conditions | None = None
    plan: LoadPlan | None = None
    steps: list[LoadStep] = field(default_factory=list)

    def add(self, step: LoadStep) -> None:
        """Take one rate's figures, and save."""
        self.steps.append(step)
        self.save()

    def keeps(self, step: LoadStep) -> bool:
        """Say whether a rate kept the objectives, to its end."""
        return step.complete and step.attainment.share >= self.wanted_share

    @property
    def highest_rate(self) -> float | None:
        """The highest rate that kept the objectives, with a client that kept up; None if none."""
        good = [s.arrival_rate for s in self.steps if self.keeps(s) and s.client_kept_up]
        return max(good, default=None)

    def values(self) -> dict[str, object]:
        """Return the record as JSON values."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "created_at": self.created_at,
            "command": self.command,
            "objectives": self.objectives.model_dump(),
            "wanted_share": self.wanted_share,
            "highest_rate": self.highest_rate,
            "conditions": self.conditions and dataclasses.asdict(self.conditions),
            "plan": self.plan and dataclasses.asdict(self.plan),
            "steps": [
                {
                    **dataclasses.asdict(step),
                    "kept": self.keeps(step),
                    "client_kept_up": step.client_kept_up,
                }
                for step in self.steps
            ],
        }

    def save(self) -> None:
        """Write the JSON file, whole or not at all."""
        if self.path is not None:
            write_text(self.path, json.dumps(self.values(), indent=2) + "\n", "--json")

    def text(self) -> str:
        """Write it for the terminal."""
        parts = [table(shown.header, shown.rows) for shown in self._tables()]
        return "\n\n".join([*parts, self._verdict(), *self._warnings()])

    def write_html(self, path: Path) -> None:
        """Write the page.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        parts = [
            page.heading(1, "specserve load"),
            page.paragraph(f"{self.created_at}   {self.command}", "faint"),
            page.paragraph(self._verdict()),
            *(page.paragraph(text, "unsure") for text in self._warnings()),
            page.plots(self._plots()),
            *(page.table(t.header, t.rows, t.title) for t in self._tables()),
        ]
        if self.conditions is not None:
            parts.append(page.heading(2, "Conditions"))
            parts += [
                page.table(shown.header, shown.rows, shown.title, is_text=True)
                for shown in (models(self.conditions), conditions_table(self.conditions))
            ]
        write_text(path, page.page("specserve load", parts), "--report")

    def _tables(self) -> list[Table]:
        rates = tuple(
            (
                f"{step.arrival_rate:g}",
                str(step.summary.num_requests),
                str(step.summary.num_failed),
                f"{step.summary.requests_per_s:.3f}",
                f"{step.summary.tokens_per_s:.1f}",
                str(step.max_in_flight),
                f"{100 * step.attainment.share:.1f} %",
                f"{step.goodput:.3f}",
                ", ".join(f"{name} {n}" for name, n in step.attainment.missed.items() if n) or "-",
            )
            for step in self.steps
        )
        latencies = tuple(
            (
                f"{step.arrival_rate:g}",
                milliseconds(step.summary.ttft_s),
                milliseconds(step.summary.itl_s),
                milliseconds(step.summary.tpot_s),
                milliseconds(step.summary.e2e_s),
            )
            for step in self.steps
        )
        return [
            Table(
                "By rate",
                ("rate", "due", "failed", "done/s", "tokens/s", "most in flight", "met",
                 "goodput/s", "missed"),
                rates,
            ),
            Table(
                "Latency in ms, p50 / p95 / p99", ("rate", "TTFT", "ITL", "TPOT", "E2E"), latencies
            ),
        ]  # fmt: skip

    def _plots(self) -> list[tuple[str, str]]:
        met = [
            Bar(
                f"{step.arrival_rate:g} requests/s",
                step.attainment.share,
                f"{100 * step.attainment.share:.1f} %",
                2 if self.keeps(step) else 1,
            )
            for step in self.steps
        ]
        drawn = [(bars("Requests that met every objective", met), "")]
        for name, title in LATENCIES:
            rows = [
                Range(
                    f"{step.arrival_rate:g} requests/s",
                    in_ms(found),
                    f"{1e3 * found.p50:.0f} / {1e3 * found.p99:.0f}",
                )
                for step in self.steps
                if (found := _quantiles(step, name)) is not None
            ]
            if rows:
                drawn.append((ranges(f"{title}, ms", rows), "p50 (large), p95, p99"))
        return drawn

    def _verdict(self) -> str:
        if not self.objectives.any:
            return "No objectives were set: every request that ended well met them."
        if self.highest_rate is None:
            return "No rate kept the objectives."
        return f"Highest rate that kept the objectives: {self.highest_rate:g} requests/s."

    def _warnings(self) -> list[str]:
        texts = []
        for step in self.steps:
            rate = f"At {step.arrival_rate:g} requests/s"
            if not step.client_kept_up:
                texts.append(
                    f"{rate} the client itself sent its requests more than "
                    f"{1e3 * MAX_CLIENT_LATE_S:.0f} ms late: its figures are its own."
                )
            if not step.complete:
                texts.append(f"{rate} the run was cut short.")
            texts += [f"{rate}: {error}" for error in step.summary.errors]
        return texts


def _quantiles(step: LoadStep, name: str) -> Quantiles | None:
    found: Quantiles | None = getattr(step.summary, name)
    return found
