"""From one row of logits to the distribution a request samples from: the numpy reference.

The order, the same on draft and target: temperature, then min-p, then top-k, then top-p over what
min-p and top-k left (the order of vLLM, whose names the parameters carry). Each of the filters
keeps a prefix of one ranking, (logit descending, token id ascending), so ties never depend on a
sort's whims. Knows no randomness, no acceptance and no tensor library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.types import GREEDY_TEMPERATURE, SamplingParams


class UnusableLogits(ValueError):
    """A row holds NaN or +inf, or nothing finite at all; its request must fail, no other."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row

    def __str__(self) -> str:
        return f"row {self.row} has no usable logits (NaN, +inf, or all -inf)"


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution by its support; every id in it has probability > 0, every other has 0."""

    token_ids: NDArray[np.int64]
    """[n] ascending, n >= 1."""
    log_weights: NDArray[np.float64]
    """[n]; (logit - largest logit) / temperature: log-probabilities up to a constant, <= 0."""
    probs: NDArray[np.float64]
    """[n]; sums to 1 up to rounding."""

    def prob(self, token_id: int) -> float:
        """Return the probability of one token id; 0 for any id outside the support."""
        index = int(self.token_ids.searchsorted(token_id))
        if index < self.token_ids.size and self.token_ids[index] == token_id:
            return float(self.probs[index])
        return 0.0


def is_greedy(params: SamplingParams) -> bool:
    """Return whether these parameters mean the one most likely token."""
    return params.temperature < GREEDY_TEMPERATURE


def is_filtered(params: SamplingParams) -> bool:
    """Return whether any of top-k, top-p and min-p removes tokens."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def kept_count(
    ranked_log_weights: NDArray[np.float64],
    params: SamplingParams,
    full_weight: float | None = None,
) -> int:
    """Count the tokens that min-p, top-k and top-p keep: a prefix of the ranking.

    Args:
        ranked_log_weights: [m] descending, the first is 0; the most likely tokens of the row.
        full_weight: sum of exp(log_weight) over *all* tokens of the row that min-p keeps, for top-p
            without top-k when the ranking is cut short; None when the ranking holds them all.

    Returns:
        1..m. When it is m and the ranking was cut short, the true count may be larger.
    """
    weights = np.exp(ranked_log_weights)
    count = int(np.count_nonzero(weights))
    if params.min_p > 0.0:
        count = min(count, int(np.count_nonzero(weights >= params.min_p)))
    if params.top_k > 0:
        count = min(count, params.top_k)
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights[:count])
        whole = float(cumulative[-1]) if count else 0.0
        if full_weight is not None and not 0 < params.top_k <= len(weights):
            whole = full_weight
        # A token stays iff those ranked before it do not reach top_p yet: the first always stays.
        count = 1 + int(np.count_nonzero(cumulative[:-1] < params.top_p * whole))
    return max(1, count)


def top_token_ids(logits: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` highest logits, ties by lowest id; ascending."""
    size = logits.size
    if count >= size:
        return np.arange(size)
    threshold = np.partition(logits, size - count)[size - count]
    above = np.flatnonzero(logits > threshold)
    tied = np.flatnonzero(logits == threshold)[: count - above.size]
    return np.sort(np.concatenate((above, tied)))


def largest_logit(logits: NDArray[np.floating], row: int) -> float:
    """Return the largest logit of a row, or refuse the row.

    Raises:
        UnusableLogits: NaN or +inf anywhere, or nothing finite.
    """
    largest = float(logits.max()) if logits.size else float("nan")  # NaN wins every maximum
    if not math.isfinite(largest):
        raise UnusableLogits(row)
    return largest


def transform(logits: NDArray[np.floating], params: SamplingParams, row: int = 0) -> Distribution:
    """Apply temperature, min-p, top-k and top-p to one row.

    Args:
        logits: [V]; -inf bans a token.
        row: number carried by the error, nothing else.

    Raises:
        UnusableLogits: NaN or +inf anywhere, or nothing finite.
    """
    largest = largest_logit(logits, row)
    if is_greedy(params):
        return Distribution(
            np.array([int(logits.argmax())]), np.zeros(1, np.float64), np.ones(1, np.float64)
        )
    if not is_filtered(params):
        log_weights = (logits.astype(np.float64) - largest) / params.temperature
        return distribution(np.arange(logits.size), log_weights)
    if 0 < params.top_k < logits.size:
        token_ids = top_token_ids(logits, params.top_k)
    else:
        token_ids = np.arange(logits.size)
    log_weights = (logits[token_ids].astype(np.float64) - largest) / params.temperature
    count = kept_count(np.sort(log_weights)[::-1], params)
    # Ranked by logit, as everywhere: log-weights may tie where logits do not.
    kept = top_token_ids(logits[token_ids], count)
    return distribution(token_ids[kept], log_weights[kept])


def distribution(token_ids: NDArray[np.integer], log_weights: NDArray[np.float64]) -> Distribution:
    """Normalise a support; tokens whose weight underflows to 0 leave it.

    Args:
        token_ids: [n] ascending.
        log_weights: [n]; the largest is 0.
    """
    weights = np.exp(log_weights)
    ids = np.asarray(token_ids, np.int64)
    if not weights.all():
        positive = weights > 0.0
        ids, log_weights, weights = ids[positive], log_weights[positive], weights[positive]
    return Distribution(ids, log_weights, weights / weights.sum())
