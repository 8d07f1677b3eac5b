"""The GPU check's frame: stages under a budget, what fails it, and what it needs."""

from __future__ import annotations

import asyncio
import json
import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specserve.errors import PeerUnavailable
from specserve.tools.gpu_check import __main__ as entry
from specserve.tools.gpu_check import command
from specserve.tools.gpu_check.command import CheckOptions, is_passed, run_checks
from specserve.tools.gpu_check.plan import TINY
from specserve.tools.gpu_check.requirements import NEEDED, advice, shortages
from specserve.tools.gpu_check.shapes import DRAFT_1B, TARGET_8B, write_model
from specserve.tools.gpu_check.stages import (
    Budget,
    CheckFailed,
    Figures,
    Stage,
    StageReport,
    Status,
    run_stage,
)
from specserve.tools.gpu_check.tables import report_table

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def stage(run: Callable[[Figures], None], *, least_s: float = 5.0, is_gate: bool = True) -> Stage:
    async def body(figures: Figures, limit_s: float) -> None:
        figures["limit_s"] = limit_s
        run(figures)

    return Stage("some", body, least_s, 20.0, is_gate)


async def test_a_stage_gets_the_time_that_is_left_or_is_skipped_with_a_reason() -> None:
    """Its own limit while the budget has more, then the rest, then nothing."""
    clock = Clock()
    budget = Budget(60.0, clock)
    reports = []
    for now in (100.0, 145.0, 157.0):
        clock.now = now
        reports.append(await run_stage(stage(lambda figures: None), budget))

    assert [report.status for report in reports] == [Status.PASSED, Status.PASSED, Status.SKIPPED]
    assert [report.figures.get("limit_s") for report in reports] == [20.0, 15.0, None]
    assert reports[2].reason == "3 s are left, 5 s are wanted"
    assert not is_passed(reports)
    assert is_passed(reports[:2])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CheckFailed("not the law"), "not the law"),
        (PeerUnavailable("target", "gone"), "PeerUnavailable: "),
        (RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
        (AssertionError("no CUDA"), "AssertionError: no CUDA"),
        (ExceptionGroup("some", [KeyError("x")]), "ExceptionGroup: some"),
        (TimeoutError(), "cut short after 20 s"),
    ],
)
async def test_a_stage_that_fails_keeps_what_it_had(error: Exception, reason: str) -> None:
    """Whatever it raises is in the record beside its figures; a gate fails the check by it."""

    def run(figures: Figures) -> None:
        figures["half"] = 1
        raise error

    report = await run_stage(stage(run), Budget(60.0))
    free = await run_stage(stage(run, is_gate=False), Budget(60.0))
    record = json.loads(json.dumps(report.record()))

    assert report.status is Status.FAILED
    assert report.reason.startswith(reason)
    assert record["half"] == 1
    assert not is_passed([report])
    assert is_passed([free])


async def test_a_stage_that_hangs_is_cut_short() -> None:
    """The limit ends it, whatever it waits for."""

    async def hang(figures: Figures, _limit_s: float) -> None:
        figures["begun"] = True
        await asyncio.Event().wait()

    report = await run_stage(Stage("some", hang, 0.0, 0.01, is_gate=True), Budget(60.0))

    assert (report.status, report.figures) == (Status.FAILED, {"begun": True})
    assert "cut short" in report.reason


def test_the_time_is_taken_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` hands on when it began: imports take seconds of the budget."""
    events = []
    monkeypatch.setattr(
        entry, "time", SimpleNamespace(monotonic=lambda: events.append("time") or 50.0)
    )
    monkeypatch.setattr(entry, "shortages", lambda: events.append("packages"))
    monkeypatch.setattr(command, "run", lambda args, began: events.append(began) or 0)
    monkeypatch.setattr("sys.argv", ["gpu_check", "--device=cpu"])

    assert entry.main() == 0
    assert events == ["time", "packages", 50.0]


@pytest.mark.slow
async def test_what_came_before_and_the_end_are_in_the_budget() -> None:
    """A thousand seconds are gone, ten are left for the end: two are too few for any stage."""
    began = time.monotonic() - 1000.0
    options = CheckOptions(TINY, "cpu", 1002.0 + command.END_S, began, None, graphs=True)
    reports = await run_checks(options)

    assert {report.status for report in reports} == {Status.SKIPPED}
    assert [report.name for report in reports if report.is_gate] == [
        "sampler",
        "attention",
        "parity",
        "law",
    ]


async def test_services_that_cannot_be_stopped_cost_no_stage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What closing raises is logged, and the check goes on."""

    async def close() -> None:
        raise OSError("no such process")

    await command._end(close)

    assert "no such process" in caplog.text


def test_what_it_needs_is_here_and_no_newer_than_the_project_asks() -> None:
    """A bound here is the project's own; transformers' may be older, which a GPU machine has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {}
    for line in project["dependencies"]:
        found = re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line)
        assert found is not None
        name, version = found.groups()
        bounds[name.replace("_", "-")] = tuple(map(int, version.split(".")))

    assert shortages() == []
    assert not {
        name: (bound, bounds[name])
        for name, bound in NEEDED.items()
        if name in bounds and name != "transformers" and bound != bounds[name]
    }
    assert NEEDED["transformers"] <= bounds["transformers"]


def test_a_shortage_says_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that is too old is named, and so is the way out."""
    monkeypatch.setitem(NEEDED, "numpy", (999, 1))
    monkeypatch.setitem(NEEDED, "no-such-thing", (1,))
    text = advice(shortages())

    assert re.search(r"numpy \d[\w.]* is installed, 999.1 or newer is wanted", text)
    assert "no-such-thing is not installed, 1 or newer is wanted" in text
    assert "pip download" in text


@pytest.mark.slow
def test_the_large_shapes_are_what_they_say(tmp_path: Path) -> None:
    """8.03 and 1.24 billion weights, by their own configurations."""
    counts = []
    for shape in (TARGET_8B, DRAFT_1B):
        folder = write_model(shape, tmp_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        counts.append(sum(parameter.numel() for parameter in model.parameters()) / 1e9)

    assert counts == pytest.approx([8.03, 1.24], abs=0.01)
    assert TARGET_8B.embedding_bytes("bfloat16") == 128_256 * 4096 * 2
    assert DRAFT_1B.embedding_bytes("bfloat16") == 0


def test_the_table_shows_every_stage_and_its_figures() -> None:
    """What was measured, and a dash for what was not."""
    steps = StageReport("steps", False, Status.PASSED, "", 1.0)
    steps.figures["steps"] = [
        {"model": "target", "rows": 5, "batch": 8, "forward_ms": 20.0, "step_ms": 25.0}
        | {"limit_ms": 5.0}
    ]
    rates = StageReport("rates", False, Status.FAILED, "cut short", 2.0)
    rates.figures["rates"] = [
        {"batch": 8, "rule": "greedy", "num_speculative_tokens": 4, "tokens_per_s": 100.0}
        | {"round_ms": 30.0, "overhead_ms": None, "mean_acceptance_length": 3.0}
    ]
    text = report_table([steps, rates, StageReport("late", True)])

    assert "0.20" in text
    assert "cut short" in text
    assert re.search(r"8 +greedy +4 +100.00 +30.00 +- +3.00", text)
    assert re.search(r"late +yes +skipped", text)
