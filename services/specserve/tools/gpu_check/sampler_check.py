"""The device's sampler against the numpy reference, row by row, on a vocabulary of real size.

Knows both samplers; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specserve.model.sampler import draw_proposals, score_rows
from specserve.speculation.scoring import DraftRow, TargetRow, propose_row, score_row
from specserve.speculation.types import AcceptanceRule, SamplingParams

STANDARD, COUPLED = AcceptanceRule.STANDARD, AcceptanceRule.COUPLED
SHARPNESS = 3.0
LARGEST_PROB_ERROR = 1e-9
"""Sums of float64 in another order differ by less; anything larger is a mistake."""
SUPPORT_SIZE = 64


def sampling_kinds(number: int) -> tuple[SamplingParams, ...]:
    """Return one set of parameters for every path through the sampler."""
    return (
        SamplingParams(AcceptanceRule.GREEDY, number, 0, temperature=0.0),
        SamplingParams(STANDARD, number, 0),
        SamplingParams(STANDARD, number, 0, temperature=0.7, top_k=40),
        SamplingParams(STANDARD, number, 0, top_p=0.9),
        SamplingParams(STANDARD, number, 0, min_p=0.05),
        SamplingParams(COUPLED, number, 0),
        SamplingParams(COUPLED, number, 0, temperature=0.8, top_p=0.95),
    )


@dataclass(frozen=True, slots=True)
class SamplerReport:
    """What the comparison showed."""

    num_rows: int
    num_different_draws: int
    num_different_scores: int
    """Rows with another replacement."""
    largest_prob_error: float
    """Of the draft token's p."""

    @property
    def passed(self) -> bool:
        """Whether the device says what the reference says."""
        differ = self.num_different_draws + self.num_different_scores
        return differ == 0 and self.largest_prob_error <= LARGEST_PROB_ERROR


def compare_sampler(vocab_size: int, device: torch.device, num_each: int = 4) -> SamplerReport:
    """Draw and score the same rows on the device and in numpy.

    Args:
        num_each: rows of each kind of sampling.
    """
    rng = np.random.default_rng(17)
    params = [kind for number in range(num_each) for kind in sampling_kinds(number)]
    shape = (len(params), vocab_size)
    drafts = (SHARPNESS * rng.standard_normal(shape)).astype(np.float32)
    targets = drafts + rng.standard_normal(shape).astype(np.float32)
    draft_rows = [DraftRow(p, 100 + i, 100, i % 4) for i, p in enumerate(params)]
    draws = draw_proposals(torch.from_numpy(drafts).to(device), draft_rows, SUPPORT_SIZE)
    ours = [
        propose_row(logits, row, SUPPORT_SIZE)
        for logits, row in zip(drafts, draft_rows, strict=True)
    ]
    # Every other row has a guess, as all but the last of a block do.
    target_rows = [
        TargetRow(
            p,
            100 + i,
            100,
            i % 4,
            ours[i].token_id if i % 2 else None,
            ours[i].support_token_ids,
            ours[i].support_weights,
        )
        for i, p in enumerate(params)
    ]
    scores = score_rows(torch.from_numpy(targets).to(device), target_rows)
    wanted = [score_row(logits, row) for logits, row in zip(targets, target_rows, strict=True)]
    pairs = list(zip(scores, wanted, strict=True))
    return SamplerReport(
        len(params),
        sum(a.token_id != b.token_id for a, b in zip(draws, ours, strict=True)),
        sum(a.replacement_token_id != b.replacement_token_id for a, b in pairs),
        max(abs(a.target_prob - b.target_prob) for a, b in pairs),
    )
