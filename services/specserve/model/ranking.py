"""The most likely tokens of many rows, ranked by (logit descending, column ascending).

What top-k, top-p and min-p keep is a prefix of this ranking, so a few candidates usually settle a
row without sorting the vocabulary. Knows no rule, no randomness and no wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model.sampler_ops import as_array, as_ids, column_of, log_weights
from specserve.speculation.transforms import is_filtered, kept_count
from specserve.speculation.types import SamplingParams

MAX_TOP_K = 1024
"""A request's larger top_k is not ranked in full."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """The head of one row's ranking."""

    columns: NDArray[np.int64]
    """[m] most likely first."""
    log_weights: NDArray[np.float64]
    """[m]; (logit - largest) / temperature."""
    count: int
    """How many of them the row's filters keep, 1..m."""
    is_exact: bool
    """False when the filters may keep tokens beyond these m."""


def can_rank(params: SamplingParams) -> bool:
    """Return whether a short ranking can settle the filters: not top-p over a very wide top-k."""
    return params.top_k <= MAX_TOP_K or params.top_p >= 1.0


def rank(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    indices: Sequence[int],
    num_candidates: int,
) -> list[Ranked]:
    """Rank the head of some rows and count what their filters keep.

    Args:
        logits: [R, V]; the rows at `indices` are finite somewhere, without NaN and +inf.
        params: [len(indices)], each passing can_rank.
        num_candidates: length of the ranking, raised to the largest top_k among the rows.

    Returns:
        One ranking per index.
    """
    if not indices:
        return []
    vocab_size = logits.shape[1]
    wide = [p.top_k for p in params if p.top_k <= MAX_TOP_K]
    chosen = logits if len(indices) == len(logits) else logits[list(indices)]
    values, columns = exact_top(chosen, max(num_candidates, *wide, 1))
    size = values.shape[1]
    full_weights = _full_weights(chosen, values[:, 0], params, size)
    result = []
    for j, p in enumerate(params):
        weights = (values[j] - values[j, 0]) / p.temperature
        count = kept_count(weights, p, full_weights.get(j)) if is_filtered(p) else size
        is_exact = (
            count < size or size == vocab_size or 0 < p.top_k <= size or np.exp(weights[-1]) == 0.0
        )
        result.append(Ranked(columns[j], weights, count, bool(is_exact)))
    return result


def _full_weights(
    logits: torch.Tensor,
    largest: NDArray[np.float64],
    params: Sequence[SamplingParams],
    size: int,
) -> dict[int, float]:
    """Sum the weights of whole rows that top-p needs, by row."""
    needed = [j for j, p in enumerate(params) if p.top_p < 1.0 and p.top_k == 0]
    if not needed or size == logits.shape[1]:
        return {}
    sums = kept_weights(
        logits if len(needed) == len(logits) else logits[needed],
        largest[needed],
        np.array([params[j].temperature for j in needed]),
        np.array([params[j].min_p for j in needed]),
    )
    return dict(zip(needed, sums.tolist(), strict=True))


def exact_top(logits: torch.Tensor, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the `count` highest logits of each row by (logit descending, column ascending).

    torch.topk leaves open which of several equal logits it takes, and logits of bfloat16 heads are
    often equal: the last place is given to the lowest columns here.

    Returns:
        [R, count] logits and [R, count] columns.
    """
    vocab_size = logits.shape[1]
    wanted = min(count, vocab_size)
    top = logits.topk(min(wanted + 1, vocab_size), dim=1)
    values, columns = as_array(top.values).astype(np.float64), as_ids(top.indices)
    if wanted < vocab_size:
        last = values[:, wanted - 1]
        for row in np.flatnonzero((last == values[:, wanted]) & (last > -np.inf)):
            num_above = int(np.count_nonzero(values[row] > last[row]))
            tied = (logits[row] == logits[row, int(columns[row, wanted])]).nonzero()[:, 0]
            columns[row, num_above:wanted] = as_ids(tied[: wanted - num_above])
        values, columns = values[:, :wanted], columns[:, :wanted]
    order = np.lexsort((columns, -values), axis=1)
    return np.take_along_axis(values, order, 1), np.take_along_axis(columns, order, 1)


def kept_weights(
    logits: torch.Tensor,
    largest: NDArray[np.floating],
    temperatures: NDArray[np.float64],
    min_ps: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return each row's sum of exp(log_weight) over the tokens that min-p keeps; [R]."""
    weights = log_weights(logits, largest, temperatures).exp_()
    weights *= weights >= column_of(min_ps, logits.device)
    return as_array(weights.sum(dim=1)).astype(np.float64)
