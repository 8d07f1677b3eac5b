"""The child that times a model's steps in a process of its own: one JSON line per figure.

`python -m specserve.tools.gpu_check.step_process JOB`; a crash or a limit costs the lines that were
still to come, nothing else. Knows runners and clocks; knows no service.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch

from specserve.config import EngineConfig
from specserve.model.hf_runner import HuggingFaceRunner
from specserve.model.loading import load_runner, resolve_device
from specserve.model.runner import Runner, SequenceSlice
from specserve.model.sampler import draw_proposals, score_rows
from specserve.speculation.scoring import DraftRow, TargetRow
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.terminal import say

GREEDY = SamplingParams(AcceptanceRule.GREEDY, seed=0, choice=0, temperature=0.0)
NUM_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class StepJob:
    """What the child measures."""

    models: dict[str, str]
    """Folders by role: target, draft."""
    device: str
    dtype: str
    rows: list[int]
    """New tokens a sequence of the target; the draft takes one."""
    batches: list[int]
    context_length: int
    num_repeats: int
    num_kv_blocks: int
    copy_bytes: int
    vocab_size: int
    embedding_bytes: dict[str, int]
    """By role: a table beside the head, of which a step reads a few rows."""
    enforce_eager: bool


@dataclass(frozen=True, slots=True)
class StepTime:
    """One cell of the table."""

    model: str
    rows: int
    """New tokens a sequence."""
    batch: int
    forward_ms: float
    step_ms: float
    """With greedy sampling, as an engine does it."""
    limit_ms: float
    """Reading the weights and the cached keys and values once, at the bandwidth of a copy."""


def main(text: str) -> None:
    """Measure everything that the job asks for."""
    job = StepJob(**json.loads(text))
    device = resolve_device(job.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    bandwidth = measure_bandwidth(device, job.copy_bytes)
    _say("device", name=_device_name(device), bandwidth_gb_s=bandwidth / 1e9, torch=_torch_name())
    for role in ("draft", "target"):
        for cell in _time_model(job, role, device, bandwidth):
            _say("step", **asdict(cell))


def measure_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return bytes per second, read and written, of a copy of so many bytes."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / (_median_ms(lambda: copy.copy_(source), device, 5) / 1e3)


def _time_model(
    job: StepJob, role: str, device: torch.device, bandwidth: float
) -> Iterator[StepTime]:
    """Measure one cell after the other; say before each how it is run."""
    began = time.monotonic()
    runner = load_runner(
        EngineConfig(
            model=job.models[role],
            load_format="dummy",
            dtype="bfloat16" if job.dtype == "bfloat16" else "float32",
            device=job.device,
            num_kv_blocks=job.num_kv_blocks,
            num_threads=1 if device.type == "cpu" else None,
            enforce_eager=job.enforce_eager,
        )
    )
    info = runner.info
    _say("loaded", model=role, seconds=time.monotonic() - began, weights_bytes=info.weights_bytes)
    weights_bytes = info.weights_bytes - job.embedding_bytes[role]
    kv_bytes = info.kv_cache_bytes / (info.num_blocks * info.block_size)
    for batch in job.batches:
        for rows in job.rows if role == "target" else [1]:
            slices = _slices(job, info.block_size, batch, rows)
            step = _target_step if role == "target" else _draft_step
            forward_ms = _median_ms(partial(runner.forward, slices), device, job.num_repeats)
            step_ms = _median_ms(partial(step, runner, slices), device, job.num_repeats)
            num_bytes = weights_bytes + batch * job.context_length * kv_bytes
            if isinstance(runner, HuggingFaceRunner) and (counts := runner.graph_counts):
                _say("graphs", model=role, **asdict(counts))
            yield StepTime(role, rows, batch, forward_ms, step_ms, 1e3 * num_bytes / bandwidth)


def _slices(job: StepJob, block_size: int, batch: int, rows: int) -> list[SequenceSlice]:
    num_blocks = -(-(job.context_length + rows) // block_size)
    return [
        SequenceSlice(
            [(7 + 31 * (index + row)) % job.vocab_size for row in range(rows)],
            job.context_length,
            range(index * num_blocks, (index + 1) * num_blocks),
            rows,
        )
        for index in range(batch)
    ]


def _target_step(runner: Runner, batch: list[SequenceSlice]) -> object:
    length = batch[0].start_position
    rows = [
        TargetRow(GREEDY, length + row, length, row, None)
        for part in batch
        for row in range(part.num_logit_rows)
    ]
    return score_rows(runner.forward(batch), rows)


def _draft_step(runner: Runner, batch: list[SequenceSlice]) -> object:
    length = batch[0].start_position
    rows = [DraftRow(GREEDY, length, length, 0) for _ in batch]
    return draw_proposals(runner.forward(batch), rows, 64, runner.logit_token_ids)


def _median_ms(run: Callable[[], object], device: torch.device, num_repeats: int) -> float:
    times = []
    for repeat in range(NUM_WARM_UPS + num_repeats):
        _wait_for(device)
        began = time.perf_counter()
        run()
        _wait_for(device)
        if repeat >= NUM_WARM_UPS:
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _torch_name() -> str:
    return str(torch.__version__)


def _say(kind: str, **fields: object) -> None:
    say(json.dumps({"kind": kind, **fields}))


if __name__ == "__main__":
    main(sys.argv[1])
