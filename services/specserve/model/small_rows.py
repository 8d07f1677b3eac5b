"""Small vocabularies on the CPU: the rows of one forward as one matrix.

There a numpy call costs more than its arithmetic, and `speculation/scoring.py` row by row is calls
only. These functions give its numbers bit for bit (what is elementwise, a sum along a contiguous
row and a running sum round alike in one row and in many) and leave to it every row that is not
simple: filters, underflow, a q of another width. Knows no session, no cache and no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.model.small_standard import draw_standard, log_weights, score_standard
from specserve.speculation.randomness import keyed_leading_noise, keyed_noise
from specserve.speculation.scoring import (
    DraftDraw,
    DraftRow,
    TargetRow,
    TargetRowScore,
    noise_key,
    propose_row,
    score_row,
)
from specserve.speculation.transforms import UnusableLogits, is_filtered, is_greedy
from specserve.speculation.types import AcceptanceRule

UNUSABLE_DRAW = DraftDraw(-1)
UNUSABLE_SCORE = TargetRowScore(0.0, -1)


def draw_small(
    logits: NDArray[np.floating],
    rows: Sequence[DraftRow],
    top_k: int,
    ids: NDArray[np.int64] | None,
) -> list[DraftDraw]:
    """Draw one draft token per row; see sampler.draw_proposals.

    Args:
        logits: [R, V'].
        ids: [V'] ascending ids of the columns when the head was cut.
    """
    if len(rows) == 1:
        try:
            return [propose_row(logits[0], rows[0], top_k, ids)]  # alone, it is cheaper there
        except UnusableLogits:
            return [UNUSABLE_DRAW]
    top, usable = _tops(logits)
    draws = [UNUSABLE_DRAW] * len(rows)
    standard: list[int] = []
    coupled: list[int] = []
    for i, row in enumerate(rows):
        if not usable[i]:
            continue
        if is_greedy(row.params):
            draws[i] = DraftDraw(int(top[i] if ids is None else ids[top[i]]))
        elif is_filtered(row.params):
            draws[i] = propose_row(logits[i], row, top_k, ids)
        elif row.params.rule is AcceptanceRule.COUPLED:
            coupled.append(i)
        else:
            standard.append(i)
    if standard:
        of_part = [rows[i] for i in standard]
        columns, weights = _ranked(_part(logits, standard), of_part, top_k)
        columns = columns if ids is None else ids[columns]
        for i, draw in zip(standard, draw_standard(columns, weights, of_part), strict=True):
            draws[i] = draw
    if coupled:
        of_part = [rows[i] for i in coupled]
        columns, weights = _ranked(_part(logits, coupled), of_part, top_k)
        keys = [noise_key(row) for row in of_part]
        if ids is None:
            noise = keyed_leading_noise(keys, logits.shape[1])[_arange(len(columns)), columns]
        else:
            columns = ids[columns]
            noise = np.stack(keyed_noise(keys, list(columns)))
        best = (weights - np.log(noise)).argmax(axis=1).tolist()
        for j, i in enumerate(coupled):
            draws[i] = DraftDraw(int(columns[j, best[j]]))
    return draws


def score_small(logits: NDArray[np.floating], rows: Sequence[TargetRow]) -> list[TargetRowScore]:
    """Score target rows, log-probabilities apart; see sampler.score_rows.

    Args:
        logits: [R, V].
    """
    if len(rows) == 1:
        try:
            return [score_row(logits[0], rows[0])]
        except UnusableLogits:
            return [UNUSABLE_SCORE]
    top, usable = _tops(logits)
    scores = [UNUSABLE_SCORE] * len(rows)
    standard: list[int] = []
    coupled: list[int] = []
    for i, row in enumerate(rows):
        if not usable[i]:
            continue
        if is_greedy(row.params):
            scores[i] = TargetRowScore(1.0 if row.draft_token_id == top[i] else 0.0, top[i])
        elif is_filtered(row.params):
            scores[i] = score_row(logits[i], row)
        elif row.params.rule is AcceptanceRule.STANDARD:
            standard.append(i)
        else:
            coupled.append(i)
    if standard:
        of_part = [rows[i] for i in standard]
        for i, score in zip(
            standard, score_standard(_part(logits, standard), of_part), strict=True
        ):
            scores[i] = score
    if coupled:
        of_part = [rows[i] for i in coupled]
        part = _part(logits, coupled)
        noise = keyed_leading_noise([noise_key(row) for row in of_part], logits.shape[1])
        best = (log_weights(part, part, of_part) - np.log(noise)).argmax(axis=1).tolist()
        for i, token_id in zip(coupled, best, strict=True):
            drafted = rows[i].draft_token_id
            scores[i] = TargetRowScore(1.0 if drafted == token_id else 0.0, token_id)
    return scores


def _tops(logits: NDArray[np.floating]) -> tuple[list[int], list[bool]]:
    """Return each row's most likely column, and whether it is usable (NaN wins an argmax)."""
    columns = logits.argmax(axis=1)
    largest = logits[np.arange(len(columns)), columns]
    return columns.tolist(), np.isfinite(largest).tolist()


def _part(logits: NDArray[np.floating], indices: list[int]) -> NDArray[np.floating]:
    return logits if len(indices) == len(logits) else logits[indices]


def _arange(size: int) -> NDArray[np.int64]:
    return np.arange(size)[:, None]


def _ranked(
    logits: NDArray[np.floating], rows: Sequence[DraftRow], top_k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return columns and log-weights, [R, k] both, by (logit descending, column ascending)."""
    columns = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    return columns, log_weights(logits[_arange(len(columns)), columns], logits, rows)
