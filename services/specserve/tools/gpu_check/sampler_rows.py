"""The rows of a sampler check: every way of sampling, and some of them under every kind of edit.

Values only.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.row_edits import RowEdits
from specserve.speculation.scoring import DraftRow
from specserve.speculation.types import AcceptanceRule, SamplingParams

STANDARD, COUPLED = AcceptanceRule.STANDARD, AcceptanceRule.COUPLED
NUM_EACH = 4
"""Rows of each kind of sampling that are not edited."""
_NUM_SEEN = 40


class EditKind(StrEnum):
    """What a request can ask to be done to its rows."""

    BIAS = "bias"
    PENALTIES = "penalties"
    BANS = "bans"
    FEW_ALLOWED = "few allowed"
    ALL = "all"
    """Of each something; most tokens are allowed, as by a grammar, which is looked up otherwise."""


def sampling_kinds(number: int) -> tuple[SamplingParams, ...]:
    """Return one set of parameters for every path through the sampler."""
    return (
        SamplingParams(AcceptanceRule.GREEDY, number, 0, temperature=0.0),
        SamplingParams(STANDARD, number, 0),
        SamplingParams(STANDARD, number, 0, temperature=0.7, top_k=40),
        SamplingParams(COUPLED, number, 0),
        SamplingParams(STANDARD, number, 0, top_p=0.9),
        SamplingParams(STANDARD, number, 0, min_p=0.05),
        SamplingParams(COUPLED, number, 0, temperature=0.8, top_p=0.95),
    )


ROW_KINDS: tuple[tuple[SamplingParams, EditKind | None], ...] = (
    *((params, None) for number in range(NUM_EACH) for params in sampling_kinds(number)),
    *((params, edit) for params in sampling_kinds(NUM_EACH)[:4] for edit in EditKind),
)
"""One of each row of a check."""


def draft_rows(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64], rng: np.random.Generator
) -> list[DraftRow]:
    """Return a row of each kind, edited where it matters most.

    Args:
        logits: [len(ROW_KINDS), V'].
        token_ids: [V'] ids of the columns, ascending.
    """
    rows = []
    for i, (params, kind) in enumerate(ROW_KINDS):
        edits = None
        if kind is not None:
            likely = token_ids[np.argsort(-logits[i], kind="stable")[:_NUM_SEEN]]
            edits = _edits(kind, likely, token_ids, rng)
        rows.append(DraftRow(params, 100 + i, 100, i % 4, edits))
    return rows


def _edits(
    kind: EditKind,
    likely: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    rng: np.random.Generator,
) -> RowEdits:
    beyond = int(token_ids[-1]) + 5  # no column has this id, and nothing may come of it
    match kind:
        case EditKind.BIAS:
            return RowEdits(np.append(likely[:8], beyond), rng.uniform(-6.0, 6.0, size=9))
        case EditKind.PENALTIES:
            return RowEdits(
                seen_token_ids=likely,
                num_outputs=rng.integers(0, 4, likely.size),
                repetition_penalty=1.3,
                frequency_penalty=0.4,
                presence_penalty=-0.7,
            )
        case EditKind.BANS:
            return RowEdits(banned_token_ids=np.append(likely[:3], beyond))
        case EditKind.FEW_ALLOWED:
            return RowEdits(allowed_token_ids=np.sort(likely[4:28]))
        case EditKind.ALL:
            return RowEdits(
                likely[1:4],
                rng.uniform(0.0, 6.0, size=3),
                seen_token_ids=likely,
                num_outputs=rng.integers(0, 4, likely.size),
                repetition_penalty=0.8,
                banned_token_ids=likely[5:9],
                allowed_token_ids=np.setdiff1d(token_ids, likely[:2]),
            )
