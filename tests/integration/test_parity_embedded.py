"""The embedded pair through plain processes: speculation changes no token."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from specserve.config import DType, SpeculativeConfig, SpeculativeMethod
from specserve.tools.terminal import Progress
from specserve.tools.verify.pairs import PairOptions, reached
from specserve.tools.verify.parity import ParityReport, compare_modes


def is_compiled() -> bool:
    """Say whether this machine compiles the embedded models' bfloat16 forward."""
    if find_spec("numba") is None:
        return False
    from specserve.model.compiled.kernels import processor_has_kernels  # noqa: PLC0415

    return processor_has_kernels()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "dtype", "num_prompts"), [("draft_model", "float32", 3), ("cascade", "auto", 3)]
)
async def test_the_embedded_pair_says_the_same_with_speculation_on_and_off(
    method: SpeculativeMethod, dtype: DType, num_prompts: int
) -> None:
    """B001, B002, B005: greedy and seeded coupled tokens are equal, and it does draft.

    In float32 up to near-ties; in bfloat16 where the compiled forward runs, which is exact. Uses
    the benchmark prompts where SPECSERVE_BENCH_PROMPTS names them, else the shipped ones.
    """
    if dtype == "auto":
        dtype = "bfloat16" if is_compiled() else "float32"
    named = os.environ.get("SPECSERVE_BENCH_PROMPTS")
    options = PairOptions(
        url=None,
        address=None,
        target=None,
        speculative=SpeculativeConfig(method=method),
        dtype=dtype,
        prompts=Path(named) if named else None,
        num_prompts=num_prompts,
        max_tokens=64,
        cache_dir=None,
    )
    async with reached(options) as pair:
        assert pair.pair.target.dtype == dtype
        modes = await compare_modes(
            pair.client,
            pair.prompts,
            max_tokens=64,
            concurrency=num_prompts,
            progress=Progress(),
        )
    report = ParityReport(dtype, method, modes)

    assert report.passed, report.table()
    assert all(mode.num_tokens > 0 for mode in report.modes)
    if dtype == "bfloat16":
        assert not any(mode.divergences for mode in report.modes), report.table()
