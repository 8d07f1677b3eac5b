"""The standard rule's rows of a small vocabulary, many at once; see small_rows.py.

`draw_from` and `score_row` of `speculation/scoring.py` are the reference: equal bit for bit, and
asked wherever a row is not simple. Knows no session, no cache and no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.randomness import Purpose, keyed_uniforms
from specserve.speculation.scoring import (
    DraftDraw,
    DraftRow,
    TargetRow,
    TargetRowScore,
    score_row,
    uniform_key,
)


def log_weights(
    values: NDArray[np.floating],
    logits: NDArray[np.floating],
    rows: Sequence[DraftRow] | Sequence[TargetRow],
) -> NDArray[np.float64]:
    """Return (value - largest logit of the row) / temperature; [R, n] for [R, n] values."""
    shifted = values.astype(np.float64)
    shifted -= logits.max(axis=1, keepdims=True)
    shifted /= np.array([[row.params.temperature] for row in rows])
    return shifted


def draw_standard(
    token_ids: NDArray[np.int64], ranked: NDArray[np.float64], rows: Sequence[DraftRow]
) -> list[DraftDraw]:
    """Draw one draft token of each row from its ranked support.

    Args:
        token_ids: [R, k] most likely first.
        ranked: [R, k] log-weights; the first is 0.
    """
    weights = np.exp(ranked).astype(np.float32)  # [R, k]
    support = token_ids.astype(np.int32)
    sizes = (weights > 0.0).sum(axis=1).tolist()
    uniforms = keyed_uniforms([uniform_key(row) for row in rows], Purpose.DRAFT)
    draws = []
    for j, index in enumerate(_inverse_cdfs(weights, uniforms)):
        size = sizes[j]
        # u * total can round up to total: the last id with any weight owns the end of the CDF.
        token_id = int(support[j, min(index, size - 1)])
        draws.append(DraftDraw(token_id, support[j, :size], weights[j, :size]))
    return draws


def _inverse_cdfs(weights: NDArray[np.floating], uniforms: NDArray[np.float64]) -> list[int]:
    """Return the column each u falls on; beyond the last weight where u * total is total."""
    cdf = np.cumsum(weights, axis=1, dtype=np.float64)
    thresholds = uniforms * cdf[:, -1]
    indices: list[int] = (cdf <= thresholds[:, None]).sum(axis=1).tolist()
    return indices


def score_standard(logits: NDArray[np.floating], rows: Sequence[TargetRow]) -> list[TargetRowScore]:
    """Score target rows: p of the draft token, and a draw from the residual (or from p).

    Args:
        logits: [R, V], usable rows.
    """
    probs = np.exp(log_weights(logits, logits, rows))  # [R, V]
    # Where a weight underflows the reference drops it, and sums in another order.
    is_whole: list[bool] = np.all(probs, axis=1).tolist()
    probs /= probs.sum(axis=1, keepdims=True)
    simple = _subtract_drafts(probs, rows)
    uniforms = keyed_uniforms([uniform_key(row) for row in rows], Purpose.REPLACE)
    scores = []
    for j, index in enumerate(_inverse_cdfs(probs, uniforms)):
        target_prob = simple[j]
        # Beyond the end: rounding, or nothing left of p - q.
        if target_prob is None or not is_whole[j] or index >= logits.shape[1]:
            scores.append(score_row(logits[j], rows[j]))
        else:
            scores.append(TargetRowScore(target_prob, index))
    return scores


def _subtract_drafts(probs: NDArray[np.float64], rows: Sequence[TargetRow]) -> list[float | None]:
    """Turn p into (p - q)+ in the rows with a draft token.

    Args:
        probs: [R, V]; changed.

    Returns:
        p of each row's draft token, 0.0 without one; None where the row is not simple.
    """
    vocab_size = probs.shape[1]
    target_probs: list[float | None] = [0.0] * len(rows)
    drafted: list[int] = []
    q_ids: list[NDArray[np.int32]] = []
    q_weights: list[NDArray[np.float32]] = []
    for j, row in enumerate(rows):
        token_id = row.draft_token_id
        if token_id is None:
            continue
        ids, weights = row.draft_support_token_ids, row.draft_support_weights
        target_probs[j] = None
        if ids is None or weights is None or not 0 <= token_id < vocab_size:
            continue
        if ids.ndim != 1 or ids.shape != weights.shape or (q_ids and ids.size != q_ids[0].size):
            continue
        drafted.append(j)
        q_ids.append(ids)
        q_weights.append(weights)
    if not drafted:
        return target_probs
    columns = np.concatenate(q_ids).reshape(len(drafted), -1).astype(np.int64)  # [D, k]
    q = np.concatenate(q_weights).reshape(len(drafted), -1).astype(np.float64)
    totals = q.sum(axis=1, keepdims=True)
    if not (
        columns.size
        and columns.min() >= 0
        and columns.max() < vocab_size
        and q.min() >= 0.0
        and totals.min() > 0.0
        and totals.max() < np.inf
    ):
        return target_probs
    q /= totals
    for j in drafted:
        target_probs[j] = float(probs[j, rows[j].draft_token_id])
    columns += (np.array(drafted) * vocab_size)[:, None]
    np.subtract.at(probs.reshape(-1), columns.reshape(-1), q.reshape(-1))
    np.maximum(probs, 0.0, out=probs)
    return target_probs
