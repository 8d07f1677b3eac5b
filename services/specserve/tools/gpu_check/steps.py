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
                    _take(figures, line)
                code = await asyncio.wait_for(child.wait(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                raise CheckFailed(f"cut short after {limit_s:.0f} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
            if code:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace").strip()
                raise CheckFailed(f"the measuring process ended with {code}: {text}")


async def _line(stream: asyncio.StreamReader, end: float) -> bytes:
    return await asyncio.wait_for(stream.readline(), max(0.0, end - time.monotonic()))


def _take(figures: Figures, line: bytes) -> None:
    """File one line of the child's."""
    with contextlib.suppress(ValueError):
        values = json.loads(line)
        kind = values.pop("kind")
        if kind in ("step", "loaded"):
            cells = figures.setdefault(f"{kind}s" if kind == "step" else kind, [])
            if isinstance(cells, list):
                cells.append(values)
        else:
            figures[kind] = values


def step_ms(figures: Figures, model: str, rows: int, batch: int) -> float | None:
    """Look a step time up; None where it was not measured."""
    steps = figures.get("steps")
    for cell in steps if isinstance(steps, list) else ():
        if (cell["model"], cell["rows"], cell["batch"]) == (model, rows, batch):
            return float(cell["step_ms"])
    return None
