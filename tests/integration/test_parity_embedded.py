"""The embedded pair through plain processes: speculation changes no token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specserve.config import SpeculativeMethod
from specserve.tools.verify.parity import ParityOptions, run_parity_suite


@pytest.mark.slow
@pytest.mark.parametrize(("method", "num_prompts"), [("draft_model", 8), ("cascade", 3)])
async def test_the_embedded_pair_says_the_same_with_speculation_on_and_off(
    method: SpeculativeMethod, num_prompts: int
) -> None:
    """B001, B002, B005: greedy and seeded coupled tokens are equal in float32, and it does draft.

    Uses the benchmark prompts where SPECSERVE_BENCH_PROMPTS names them, else the shipped ones.
    """
    named = os.environ.get("SPECSERVE_BENCH_PROMPTS")
    report = await run_parity_suite(
        ParityOptions(
            target=None,
            draft=None,
            dtype="float32",
            prompts=Path(named) if named else None,
            num_prompts=num_prompts,
            max_tokens=64,
            num_speculative_tokens=4,
            method=method,
            concurrency=num_prompts,
            cache_dir=None,
        )
    )

    assert report.passed, report.table()
    assert all(mode.num_tokens > 0 for mode in report.modes)
