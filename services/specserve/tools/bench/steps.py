"""`specserve bench --suite steps`: what one model step costs here, against plain transformers.

Both run the same weights in one process, turn by turn, so that a busy machine slows both alike.
Knows models and clocks; knows no service.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.model.loading import load_runner, resolve_dtype
from specserve.model.model_files import resolve_model_dir
from specserve.model.runner import Runner, SequenceSlice
from specserve.tools.models import resolve_pair

Step = Callable[[], object]

_NO_DRAFT = SpeculativeConfig(method="ngram")

_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; ratios are to one row of plain transformers."""
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
    clock = _CLOCKS[arguments.clock]
    steps: dict[tuple[str, int], Step] = {}
    for rows in arguments.rows:
        steps["transformers", rows] = _plain_step(plain, arguments.cached, rows)
        steps["specserve", rows] = _runner_step(runner, arguments.cached, rows)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    with torch.inference_mode():
        for repeat in range(arguments.repeats + 2):
            for key, step in steps.items():
                begin = clock()
                step()
                if repeat >= 2:  # the first ones warm caches up
                    times[key].append((clock() - begin) * 1e3)
    medians = {key: statistics.median(values) for key, values in times.items()}
    base = medians["transformers", arguments.rows[0]]
    write = sys.stdout.write
    write(
        f"{Path(model).name}: {runner.info.dtype}, {arguments.threads} thread(s), "
        f"{arguments.cached} tokens cached, median {arguments.clock} ms of "
        f"{arguments.repeats} steps, torch {torch.__version__}\n"
    )
    write(f"{'':14}" + "".join(f"{rows:>8} rows" for rows in arguments.rows) + "\n")
    for name in ("transformers", "specserve"):
        line = "".join(f"{medians[name, rows]:>13.1f}" for rows in arguments.rows)
        write(f"{name:14}{line}\n")
    line = "".join(f"{medians['specserve', rows] / base:>13.2f}" for rows in arguments.rows)
    write(f"{'ratio':14}{line}   (specserve / transformers at {arguments.rows[0]} rows)\n")
    return 0


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
