"""`specserve bench --suite steps`: what one model step costs here, against plain transformers.

Beside them stands what reading the weights once takes, the least that a step can. All run in one
process, turn by turn, so that a busy machine slows all alike.
Knows models and clocks; knows no service.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.model.loading import load_runner, resolve_dtype
from specserve.model.model_files import resolve_model_dir
from specserve.model.runner import Runner, SequenceSlice
from specserve.tools.bench.reading import MemoryReader, bytes_of_a_step
from specserve.tools.models import resolve_pair
from specserve.tools.terminal import human_bytes, say, table

Step = Callable[[], object]

_NO_DRAFT = SpeculativeConfig(method="ngram")

_READING = ("reading", 0)

MOST_READINGS = 2.0
"""A step of five rows may take so many times what reading the weights takes."""

WANTED_READINGS = 1.5

_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def run(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure, print and return the figures; ratios are to one row of plain transformers."""
    torch.set_num_threads(arguments.threads)
    model = resolve_pair(arguments.model, _NO_DRAFT, arguments.cache_dir).target
    config = EngineConfig(
        model=model,
        dtype=arguments.dtype,
        device="cpu",
        num_threads=arguments.threads,
        max_model_len=arguments.cached + max(arguments.rows),
    )
    runner = load_runner(config)
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        resolve_model_dir(model, None, False),
        dtype=resolve_dtype(arguments.dtype, torch.device("cpu")),
    )
    num_bytes = bytes_of_a_step(plain)
    steps: dict[tuple[str, int], Step] = {}
    for rows in arguments.rows:
        steps["transformers", rows] = _plain_step(plain, arguments.cached, rows)
        steps["specserve", rows] = _runner_step(runner, arguments.cached, rows)
    steps[_READING] = MemoryReader(num_bytes, arguments.threads).read
    medians = _measure(steps, _CLOCKS[arguments.clock], arguments.repeats)
    say(
        f"{Path(model).name}: {runner.info.dtype}, {arguments.threads} thread(s), "
        f"{arguments.cached} tokens cached, median {arguments.clock} ms of "
        f"{arguments.repeats} steps, torch {torch.__version__}"
    )
    read_ms, base = medians[_READING], medians["transformers", arguments.rows[0]]
    ours = [medians["specserve", rows] for rows in arguments.rows]
    theirs = [medians["transformers", rows] for rows in arguments.rows]
    say(
        table(
            ("", *(f"{rows} rows" for rows in arguments.rows)),
            [
                ("transformers", *(f"{time_ms:.1f}" for time_ms in theirs)),
                ("specserve", *(f"{time_ms:.1f}" for time_ms in ours)),
                (
                    f"over transformers' {arguments.rows[0]}",
                    *(f"{time_ms / base:.2f}" for time_ms in ours),
                ),
                ("over reading once", *(f"{time_ms / read_ms:.2f}" for time_ms in ours)),
            ],
        )
    )
    gb_per_s = num_bytes / read_ms / 1e6
    say(
        f"reading the weights once ({human_bytes(num_bytes)}) takes {read_ms:.1f} ms: "
        f"{arguments.threads} thread(s) read {gb_per_s:.1f} GB/s here; five rows may take at most "
        f"{MOST_READINGS:g} of that, {WANTED_READINGS:g} is wanted"
    )
    figures = {"steps.read_gb_per_s": gb_per_s, "steps.read_ms": read_ms}
    for rows, time_ms in zip(arguments.rows, ours, strict=True):
        figures[f"steps.{rows}.ms"] = time_ms
        figures[f"steps.{rows}.over_transformers"] = time_ms / base
        figures[f"steps.{rows}.over_reading"] = time_ms / read_ms
    return figures


def _measure(
    steps: dict[tuple[str, int], Step], clock: Callable[[], float], repeats: int
) -> dict[tuple[str, int], float]:
    """Take the steps by turns; the median ms of each."""
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    with torch.inference_mode():
        for repeat in range(repeats + 2):
            for key, step in steps.items():
                begin = clock()
                step()
                if repeat >= 2:  # the first ones warm caches up
                    times[key].append((clock() - begin) * 1e3)
    return {key: statistics.median(values) for key, values in times.items()}


def _plain_step(model: PreTrainedModel, cached: int, rows: int) -> Step:
    """Make a step of plain transformers over its own growing cache."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=_ids(cached), past_key_values=cache, use_cache=True)
    new = _ids(rows)

    def step() -> None:
        model(input_ids=new, past_key_values=cache, use_cache=True)
        cache.crop(-rows)  # a negative count: tokens to remove

    return step


def _runner_step(runner: Runner, cached: int, rows: int) -> Step:
    """Make a step of ours that scores all its rows."""
    size = runner.info.block_size
    table = tuple(range(-(-(cached + rows) // size)))
    runner.forward([SequenceSlice(_ids(cached)[0].tolist(), 0, table, 0)])
    new = SequenceSlice(_ids(rows)[0].tolist(), cached, table, rows)
    return lambda: runner.forward([new])


def _ids(count: int) -> torch.Tensor:
    """Return [1, count] token ids that any vocabulary of 1000 has."""
    return torch.arange(count).unsqueeze(0) % 1000
