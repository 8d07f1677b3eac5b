"""What padding a step would gain the target alone: one row a session against several.

Some kernels are faster with a few rows than with one, and speculation feeds them several; then part
of its gain is the kernel's. Runs in a process of its own, so that the model is gone when the
services start. Knows models and clocks; knows no service.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specserve.config import EngineConfig
from specserve.errors import PeerUnavailable
from specserve.tools.local_process import own_environment

NUM_CACHED = 128
"""Tokens in each session's cache."""

NUM_STEPS = 9
"""Timed steps of each kind, after one that is not."""

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class PaddedSteps:
    """Median times of one forward over some sessions."""

    num_sessions: int
    rows: tuple[int, ...]
    """Rows a session; the first is 1."""
    ms: tuple[float, ...]

    @property
    def credit(self) -> float:
        """Time at one row over the best time; 1 when padding gains nothing."""
        return self.ms[0] / min(self.ms)


async def measure_padding(
    engine: EngineConfig, num_sessions: Sequence[int], rows: Sequence[int]
) -> dict[int, PaddedSteps]:
    """Time the target's steps for each number of sessions.

    Raises:
        PeerUnavailable: the model cannot be loaded; its own words are kept.
    """
    request = {
        "engine": engine.model_dump(exclude_none=True),
        "num_sessions": list(num_sessions),
        "rows": list(rows),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "specserve.tools.bench.padding",
        json.dumps(request),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=own_environment(),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise PeerUnavailable("padded steps", err.decode(errors="replace").strip()[-2000:])
    return {
        steps["num_sessions"]: PaddedSteps(
            steps["num_sessions"], tuple(steps["rows"]), tuple(steps["ms"])
        )
        for steps in json.loads(out.splitlines()[-1])
    }


def time_steps(
    engine: EngineConfig, num_sessions: Sequence[int], rows: Sequence[int]
) -> list[PaddedSteps]:
    """Load the target here and time its forwards, the kinds of step in turns."""
    # Heavy (torch), and only needed in the process that measures.
    import torch

    from specserve.model.loading import load_runner
    from specserve.model.runner import SequenceSlice

    most, size = max(num_sessions), engine.block_size
    blocks = -(-(NUM_CACHED + max(rows)) // size)
    runner = load_runner(
        engine.model_copy(
            update={
                "num_kv_blocks": most * blocks + 1,
                "max_num_batched_tokens": max(engine.max_num_batched_tokens, most * max(rows)),
                "max_model_len": blocks * size,
            }
        )
    )
    vocab_size = runner.info.vocab_size
    tables = [tuple(range(first, first + blocks)) for first in range(0, most * blocks, blocks)]
    prompt = [1 + index % (vocab_size - 1) for index in range(NUM_CACHED)]
    results = []
    with torch.inference_mode():
        for table in tables:
            runner.forward([SequenceSlice(prompt, 0, table, 0)])
        for count in num_sessions:
            times: dict[int, list[float]] = {each: [] for each in rows}
            for step in range(NUM_STEPS + 1):
                for each in rows:
                    batch = [
                        SequenceSlice(prompt[:each], NUM_CACHED, table, each)
                        for table in tables[:count]
                    ]
                    began = time.perf_counter()
                    # To the host, so that a GPU's work is over before the clock is read.
                    runner.forward(batch).cpu()
                    if step:
                        times[each].append(1e3 * (time.perf_counter() - began))
            medians = tuple(statistics.median(times[each]) for each in rows)
            results.append(PaddedSteps(count, tuple(rows), medians))
    return results


def main(text: str) -> None:
    """Measure what the JSON asks for and write the result as JSON."""
    request = json.loads(text)
    steps = time_steps(EngineConfig(**request["engine"]), request["num_sessions"], request["rows"])
    sys.stdout.write(json.dumps([asdict(each) for each in steps]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
