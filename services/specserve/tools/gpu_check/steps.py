"""Step times, measured by a child process under a time limit.

Knows the child's lines; knows no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from specserve.tools.gpu_check.plan import CheckPlan
from specserve.tools.gpu_check.services import OFFLINE
from specserve.tools.gpu_check.stages import CheckFailed, Figures
from specserve.tools.local_process import own_environment

_LOG_TAIL_BYTES = 2000
_GRACE_S = 1.0
"""Of the stage's limit, left to end the child in."""


class Steps:
    """One child's run."""

    def __init__(
        self, plan: CheckPlan, models: Mapping[str, Path], device: str, *, enforce_eager: bool
    ) -> None:
        self._enforce_eager = enforce_eager
        self._plan = plan
        self._models = models
        self._device = device

    async def run(self, figures: Figures, limit_s: float) -> None:
        """Measure the memory, and the steps of both models."""
        plan = self._plan
        job = {
            "models": {role: str(folder) for role, folder in self._models.items()},
            "device": self._device,
            "dtype": plan.dtype,
            "rows": plan.rows,
            "batches": plan.batches,
            "context_length": plan.context_length,
            "num_repeats": plan.num_repeats,
            "num_kv_blocks": plan.num_kv_blocks,
            "copy_bytes": plan.copy_bytes,
            "vocab_size": plan.target.vocab_size,
            "embedding_bytes": {
                "target": plan.target.embedding_bytes(plan.dtype),
                "draft": plan.draft.embedding_bytes(plan.dtype),
            },
            "enforce_eager": self._enforce_eager,
        }
        with tempfile.TemporaryFile() as log:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "specserve.tools.gpu_check.step_process",
                json.dumps(job),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=own_environment(OFFLINE),
            )
            end = time.monotonic() + limit_s - _GRACE_S
            try:
                while child.stdout and (line := await _line(child.stdout, end)):
                    take(figures, line)
                code = await asyncio.wait_for(child.wait(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                raise CheckFailed(f"cut short after {limit_s:.0f} s") from None
            except CheckFailed as failure:
                raise CheckFailed(f"{failure}: {_tail(log)}") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
            if code:
                raise CheckFailed(f"the measuring process ended with {code}: {_tail(log)}")
        if not self._enforce_eager and "graphs" not in figures:
            raise CheckFailed("the measuring process had no CUDA graphs to count")


async def _line(stream: asyncio.StreamReader, end: float) -> bytes:
    return await asyncio.wait_for(stream.readline(), max(0.0, end - time.monotonic()))


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
    return log.read().decode(errors="replace").strip()


def take(figures: Figures, line: bytes) -> None:
    """File one line of the child's.

    Raises:
        CheckFailed: the cell that comes next was not replayed, though it should have been.
    """
    try:
        values = json.loads(line)
    except ValueError:
        return
    kind = values.pop("kind")
    if kind in ("step", "loaded"):
        cells = figures.setdefault(f"{kind}s" if kind == "step" else kind, [])
        if isinstance(cells, list):
            cells.append(values)
    elif kind == "graphs":
        counts = figures.setdefault(kind, {})
        if isinstance(counts, dict):
            counts[values["model"]] = values["num_graphs"]
        if values["is_broken"]:
            raise CheckFailed(f"{values['model']}: a CUDA graph could not be captured")
        if not values["num_graphs"]:
            raise CheckFailed(f"{values['model']}: no step is a CUDA graph")
    else:
        figures[kind] = values


def step_ms(figures: Figures, model: str, rows: int, batch: int) -> float | None:
    """Look a step time up; None where it was not measured."""
    steps = figures.get("steps")
    for cell in steps if isinstance(steps, list) else ():
        if (cell["model"], cell["rows"], cell["batch"]) == (model, rows, batch):
            return float(cell["step_ms"])
    return None
