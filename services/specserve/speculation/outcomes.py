"""What a verify call will probably decide, as its draft foresees it. Pure numpy, row by row.

The draft knows its own logits and, from the session's seed, every random number of the round: the
noise that the coupled rule's target races with, and the standard rule's accept and replace
uniforms. It does not know p. So it plays each row with q in place of p: the coupled rule's
replacement is among the runners-up of the same race, a small accept uniform is probably passed,
and a replacement lies near its uniform in the CDF of what is left of q.

Only *when* a proposal is computed may follow from this, never what it says. Knows no session, no
cache and no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.randomness import Purpose, exponential_noise, uniform
from specserve.speculation.scoring import DraftRow, noise_key, uniform_key
from specserve.speculation.transforms import is_greedy
from specserve.speculation.types import AcceptanceRule

BONUS_SPREAD = 0.05
"""How far p's CDF is taken to lie from q's, on either side, for the bonus token."""

RECOVERED_SPREAD = 0.25
"""The same for the residual, of which q tells less."""


@dataclass(frozen=True, slots=True)
class RowForecast:
    """One row of a verify block, foreseen."""

    confidence: float
    """In [0, 1], larger where acceptance is likelier; not a probability. 0 on the bonus row."""
    token_ids: tuple[int, ...]
    """Replacements if the round ends here, likeliest first; never the draft token."""
    weights: tuple[float, ...]
    """In [0, 1], of each of them; not probabilities either."""


def foresee_row(
    token_ids: NDArray[np.int64],
    logits: NDArray[np.floating],
    row: DraftRow,
    draft_token_id: int | None,
    count: int,
) -> RowForecast:
    """Foresee one row from the draft's own logits.

    Args:
        token_ids: [k] the draft's most likely tokens.
        logits: [k] theirs, at least one finite.
        row: its keys: those of the round that is being verified.
        draft_token_id: the guess at this row; None on the bonus row.
        count: most replacements to name.
    """
    params = row.params
    scores = logits.astype(np.float64) - float(logits.max())
    if not is_greedy(params):
        scores /= params.temperature
    is_standard = params.rule is AcceptanceRule.STANDARD and not is_greedy(params)
    if params.rule is AcceptanceRule.COUPLED and not is_greedy(params):
        scores -= np.log(exponential_noise(*noise_key(row), token_ids))
        scores -= scores.max()
    weights = np.exp(scores)
    confidence = 0.0
    if draft_token_id is not None:
        drafted = token_ids == draft_token_id
        if is_standard:
            confidence = 1.0 - uniform(*uniform_key(row), Purpose.ACCEPT)
        else:
            confidence = float(weights[drafted].sum() / weights.sum())
        weights[drafted] = 0.0
    total = float(weights.sum())
    if total <= 0.0:
        return RowForecast(confidence, (), ())
    weights /= total
    if is_standard:
        spread = BONUS_SPREAD if draft_token_id is None else RECOVERED_SPREAD
        u = uniform(*uniform_key(row), Purpose.REPLACE)
        weights = _near(token_ids, weights, u, spread)
    order = np.argsort(-weights, kind="stable")[:count]
    order = order[weights[order] > 0.0]
    return RowForecast(confidence, tuple(token_ids[order].tolist()), tuple(weights[order].tolist()))


def _near(
    token_ids: NDArray[np.int64], probs: NDArray[np.float64], u: float, spread: float
) -> NDArray[np.float64]:
    """Weigh each token by how much of its part of the CDF lies within `spread` of u.

    The CDF runs over ascending ids, as the target's does.
    """
    by_id = np.argsort(token_ids)
    upper = np.cumsum(probs[by_id])
    low, high = max(0.0, u - spread), min(1.0, u + spread)
    overlap = np.minimum(upper, high) - np.maximum(upper - probs[by_id], low)
    near = np.empty_like(probs)
    near[by_id] = np.maximum(overlap, 0.0)
    near /= max(float(near.sum()), np.finfo(np.float64).tiny)
    return near
