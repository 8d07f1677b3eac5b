"""Draws from a support, given randomness: inverse CDF, exponential race, and the residual.

No id of probability 0 is ever drawn, whatever the rounding. Knows distributions and keys; knows no
round, no session and no wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.randomness import keyed_noise
from specserve.speculation.transforms import Distribution


def inverse_cdf(weights: NDArray[np.floating], u: float) -> int:
    """Return the index that u in [0, 1) falls on; its weight is > 0 for every u.

    Args:
        weights: [n] >= 0, in the order of the CDF, not all 0; summed in float64.
    """
    cdf = weights.cumsum(dtype=np.float64)
    index = int(cdf.searchsorted(u * cdf[-1], side="right"))
    if index >= cdf.size:
        # u * total can round up to total: the last id with any weight owns the end of the CDF.
        index = int(np.flatnonzero(weights)[-1])
    return index


def coupled_choices(
    keys: Sequence[tuple[int, int, int]], candidates: Sequence[Distribution]
) -> list[int]:
    """Return argmax(log p - log E) over each row's support: an exact draw from p.

    Args:
        keys: (seed, choice, position) of each row; draft and target share the noise of a position.
    """
    noises = keyed_noise(keys, [support.token_ids for support in candidates])
    return [
        int(support.token_ids[(support.log_weights - np.log(noise)).argmax()])
        for support, noise in zip(candidates, noises, strict=True)
    ]


def residual(
    target: Distribution, q_token_ids: NDArray[np.int32], q: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute (p - q)+ over the target's support, not normalised; p itself where nothing is left.

    Nothing left means p = q up to rounding: then a rejection has probability below 1e-15, and what
    replaces it cannot be seen in the law. Falling back to p keeps p(x) = 0 impossible.

    Args:
        q_token_ids: [k]; ids outside the target's support (or the vocabulary) take nothing from it.
    """
    index = np.searchsorted(target.token_ids, q_token_ids)
    index[index == target.token_ids.size] = 0
    inside = target.token_ids[index] == q_token_ids
    left = target.probs.copy()
    np.subtract.at(left, index[inside], q[inside])
    np.maximum(left, 0.0, out=left)
    return left if left.any() else target.probs
