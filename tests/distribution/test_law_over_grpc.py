"""The law suite itself, and the law through real processes and the real gRPC path."""

from __future__ import annotations

import numpy as np
import pytest

from specserve.model.toy import ToySpec
from specserve.tools.verify import law as verify_law
from specserve.tools.verify.law import (
    CASES,
    Case,
    LawOptions,
    chi_square_p,
    exact_law,
    run_law_suite,
)


def test_the_exact_law_sums_to_one_and_respects_filters() -> None:
    """Every case's law is a distribution; top-k 2 leaves two tokens per position."""
    spec = ToySpec.parse(verify_law.TARGET)
    for case in CASES:
        law = exact_law(spec, case)
        assert sum(law.values()) == pytest.approx(1.0)
    top_two = exact_law(spec, next(case for case in CASES if case.top_k == 2))
    assert len(top_two) == 2**verify_law.LENGTH


def _draw(case: Case, num_draws: int, shift: float) -> tuple[list[float], list[float]]:
    """Draw first tokens from a law with two of them moved by `shift`, with a fixed seed."""
    law = exact_law(ToySpec.parse(verify_law.TARGET), case)
    exact = np.array([law[key] for key in sorted(law)])
    marginal = np.add.reduceat(exact, range(0, len(exact), len(exact) // 4))
    biased = marginal + np.array([shift, -shift, 0.0, 0.0])
    counts = np.random.default_rng(5).multinomial(num_draws, biased / biased.sum())
    return counts.astype(float).tolist(), (num_draws * marginal).tolist()


def test_a_biased_sampler_is_found_and_a_right_one_is_not() -> None:
    """The gate can fail: a shift of 0.02 in one probability is found in 20,000 draws.

    False alarm of the unbiased half: 1e-6; fixed seed, so it holds or it does not.
    """
    case = CASES[0]

    right = chi_square_p(*_draw(case, 20_000, 0.0))
    wrong = chi_square_p(*_draw(case, 20_000, 0.02))

    assert right > 1e-6
    assert wrong < 1e-6


def test_small_cells_are_merged_before_they_are_judged() -> None:
    """A cell that expects half a draw and got three is no evidence by itself."""
    counts = [500.0, 497.0, 3.0, 0.0]
    expected = [500.0, 499.0, 0.5, 0.5]

    assert chi_square_p(counts, expected) > 0.5


@pytest.mark.slow
async def test_speculation_keeps_the_law_through_the_services(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B019, B031: ten ways of sampling and proposing; false alarm of the suite 1e-4."""
    report = await run_law_suite(LawOptions(num_draws=1000, concurrency=32))

    assert report.passed, report.table()
    assert "declared before the run" in capsys.readouterr().out
