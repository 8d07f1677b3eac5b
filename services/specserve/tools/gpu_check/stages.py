"""Stages of a check under one time budget: run, cut short, or skipped with a reason.

Knows time and what a stage found; knows no model and no service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from specserve.errors import SpecServeError

logger = logging.getLogger(__name__)

Figures = dict[str, object]
"""What a stage found, as JSON values; filled while it runs, so that a stage cut short keeps what
it had."""


class Status(StrEnum):
    """How a stage ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class CheckFailed(Exception):
    """A stage found what must not be."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a check."""

    name: str
    run: Callable[[Figures, float], Awaitable[None]]
    """Fills the figures within so many seconds; raises CheckFailed for what must not be."""
    least_s: float
    """Not begun with less time left."""
    most_s: float
    """Cut short after this."""
    is_gate: bool
    """Whether the whole check fails unless this passes."""


@dataclass(slots=True)
class StageReport:
    """How one stage went."""

    name: str
    is_gate: bool
    status: Status = Status.SKIPPED
    reason: str = ""
    """Why it failed or was skipped."""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """Give the report as JSON values."""
        return {
            "status": self.status.value,
            "is_gate": self.is_gate,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
            **self.figures,
        }


class Budget:
    """The time that all stages share."""

    def __init__(
        self,
        total_s: float,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        """Args:
        began: the clock's time from which the total counts; None for now.
        """
        self._clock = clock
        self._end = (clock() if began is None else began) + total_s

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._end - self._clock()


async def run_stage(stage: Stage, budget: Budget) -> StageReport:
    """Run a stage within its own limit and the budget; whatever happens is in the report."""
    report = StageReport(stage.name, stage.is_gate)
    left_s = budget.left_s
    if left_s < stage.least_s:
        report.reason = f"{max(0.0, left_s):.0f} s are left, {stage.least_s:.0f} s are wanted"
        return report
    limit_s = min(left_s, stage.most_s)
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            await stage.run(report.figures, limit_s)
    except TimeoutError:
        report.status, report.reason = Status.FAILED, f"cut short after {limit_s:.0f} s"
    except CheckFailed as failure:
        report.status, report.reason = Status.FAILED, str(failure)
    except SpecServeError as error:
        report.status, report.reason = Status.FAILED, _told(error)
    except Exception as error:
        logger.exception("stage %s failed", stage.name)
        report.status, report.reason = Status.FAILED, _told(error)
    else:
        report.status = Status.PASSED
    report.seconds = time.monotonic() - began
    return report


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
