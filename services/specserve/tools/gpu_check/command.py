"""`specserve gpu-check`: what must be seen on a GPU, in one prepared run under one time budget.

Exactness first (parity, law, the sampler against its reference), then what a large pair costs. The
record is written after every stage, so that a run cut short keeps what it had. Knows the stages'
order; what they do is beside this module.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from specserve.errors import ConfigurationError
from specserve.tools.gpu_check.plan import FULL, TINY, CheckPlan
from specserve.tools.gpu_check.requirements import NEEDED, advice, installed, shortages
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
from specserve.tools.terminal import say

logger = logging.getLogger(__name__)

DEFAULT_BUDGET_S = 220.0
END_S = 10.0
"""Of the budget, left to stop the last services and write the record."""

FILE_NAME = "gpu-check.json"
GRAPHS_MARK = ", CUDA graphs"


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What was asked for."""

    plan: CheckPlan
    device: str
    budget_s: float
    began: float
    """When the budget began to run, on the monotonic clock."""
    json_path: Path | None
    """Where the record goes; None prints the table only."""
    graphs: bool
    """Also with CUDA graphs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve gpu-check`."""
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the check")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=DEFAULT_BUDGET_S,
        metavar="S",
        help="seconds for everything; stages that no longer fit are skipped (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help=f"the record as JSON; default: {FILE_NAME} in the folder that OUT names, if it does",
    )
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True, help="also CUDA graphs"
    )


def run(args: argparse.Namespace, began: float | None = None) -> int:
    """Run all stages; 0 when every gate passed, 1 when one did not or had no time.

    Args:
        began: when the process began, on the monotonic clock; None for now.
    """
    began = time.monotonic() if began is None else began
    if missing := shortages():
        raise ConfigurationError(advice(missing))
    if not args.budget_s > 0:
        raise ConfigurationError(f"--budget-s: {args.budget_s}, more than 0 was wanted")
    out = os.environ.get("OUT")
    path = args.json or (Path(out) / FILE_NAME if out else None)
    device = _found_device(args.device)
    options = CheckOptions(
        plan=TINY if args.tiny else FULL,
        device=device,
        budget_s=args.budget_s,
        began=began,
        json_path=None if path is None else Path(path),
        graphs=args.graphs and device != "cpu",
    )
    reports = asyncio.run(run_checks(options))
    say(report_table(reports))
    passed = is_passed(reports)
    say("PASSED" if passed else "FAILED")
    return 0 if passed else 1


def is_passed(reports: list[StageReport]) -> bool:
    """Say whether every gate was passed; one that was skipped was not."""
    return all(report.status is Status.PASSED for report in reports if report.is_gate)


async def run_checks(options: CheckOptions) -> list[StageReport]:
    """Run the stages one after another, within the budget."""
    # torch and transformers come with them.
    from specserve.tools.gpu_check.exactness import SmallPair
    from specserve.tools.gpu_check.rates import LargePair
    from specserve.tools.gpu_check.shapes import write_model
    from specserve.tools.gpu_check.steps import Steps

    budget = Budget(options.budget_s - END_S, began=options.began)
    reports: list[StageReport] = []

    async def stage(stage: Stage) -> StageReport:
        reports.append(report := await run_stage(stage, budget))
        say(f"{report.name}: {report.status} in {report.seconds:.1f} s {report.reason}".rstrip())
        _write(options, reports)
        return report

    with tempfile.TemporaryDirectory() as folder:
        plan, root = options.plan, Path(folder)
        small = {
            "target": write_model(plan.small, root),
            "draft": write_model(plan.small.cut(plan.small_draft_layers), root),
        }
        large = {
            "target": write_model(plan.target, root),
            "draft": write_model(plan.draft, root),
        }
        for eager in (True, False) if options.graphs else (True,):
            if eager:
                await stage(Stage("sampler", _sampler_stage(options), 3, 30, is_gate=True))
                await stage(Stage("attention", _attention_stage(options), 3, 20, is_gate=True))
            # Graphs are an option, and what they do is no gate.
            mark = "" if eager else GRAPHS_MARK
            exact = SmallPair(plan, small, options.device, enforce_eager=eager)
            try:
                await stage(Stage(f"parity{mark}", exact.parity, 15, 100, is_gate=eager))
                if eager:
                    await stage(Stage("law", exact.law, 5, 60, is_gate=True))
            finally:
                await _end(exact.close)
            steps = Steps(plan, large, options.device, enforce_eager=eager)
            timed = await stage(Stage(f"steps{mark}", steps.run, 15, 70, is_gate=False))
            pair = LargePair(plan, large, options.device, timed.figures, enforce_eager=eager)
            try:
                await stage(Stage(f"rates{mark}", pair.rates, 25, 90, is_gate=False))
                if eager:
                    await stage(Stage("bfloat16", pair.divergences, 10, 30, is_gate=False))
            finally:
                await _end(pair.close)
    return reports


async def _end(close: Callable[[], Awaitable[None]]) -> None:
    """Stop services; what hinders that costs no other stage, and they end with this process."""
    try:
        async with asyncio.timeout(END_S):
            await close()
    except Exception:
        logger.exception("services could not be stopped")


def _sampler_stage(options: CheckOptions) -> Callable[[Figures, float], Awaitable[None]]:
    import torch

    from specserve.tools.gpu_check.sampler_check import compare_sampler

    async def run(figures: Figures, _limit_s: float) -> None:
        device = torch.device(options.device)
        vocab_size = options.plan.target.vocab_size
        report = await asyncio.to_thread(compare_sampler, vocab_size, device)
        figures |= asdict(report)
        if not report.passed:
            raise CheckFailed(f"the device's sampler is not the reference's: {report}")

    return run


def _attention_stage(options: CheckOptions) -> Callable[[Figures, float], Awaitable[None]]:
    import torch

    from specserve.tools.gpu_check.attention_check import compare_attention

    async def run(figures: Figures, _limit_s: float) -> None:
        report = await asyncio.to_thread(compare_attention, torch.device(options.device))
        figures |= asdict(report)
        if not report.passed:
            raise CheckFailed(f"the device's attention is not the reference's: {report}")

    return run


def _found_device(device: str) -> str:
    """Name the device that is meant, before anything is started.

    Raises:
        ConfigurationError: it is not there.
    """
    from specserve.model.loading import resolve_device

    return str(resolve_device(device))


def _write(options: CheckOptions, reports: list[StageReport]) -> None:
    if options.json_path is None:
        return
    record = {
        "command": "gpu-check",
        "device": options.device,
        "passed": is_passed(reports),
        "budget_s": options.budget_s,
        "packages": {name: installed(name) for name in NEEDED},
        "stages": {report.name: report.record() for report in reports},
    }
    options.json_path.parent.mkdir(parents=True, exist_ok=True)
    options.json_path.write_text(json.dumps(record, indent=2) + "\n")
