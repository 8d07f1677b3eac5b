"""When a draft stops guessing: once its own most likely tokens have become unlikely together.

Known as assistant confidence threshold (transformers) and draft p-min (llama.cpp); here the chances
of the tokens of a round are multiplied, which is how likely the draft thinks its whole guess to be.
A stop is decided by the row that a kept token was drawn from, before the next one is drawn, so no
token is ever dropped for its own value, and every acceptance rule stays exact. Knows logits; knows
no session.
"""

from __future__ import annotations

import numpy as np
import torch

from specserve.model.sampler_ops import as_array


def row_confidences(logits: torch.Tensor) -> list[float]:
    """Return the probability of each row's most likely token, at temperature 1.

    Args:
        logits: [R, V'] float32, not yet edited by what a request asks for.

    Returns:
        R numbers in (0, 1]; NaN where a row holds NaN or infinities.
    """
    if not len(logits):
        return []
    # exp(l - max) sums to the reciprocal of the largest probability.
    if logits.device.type == "cpu":
        # A third of what torch's logsumexp takes, and it stands between two drafted tokens.
        with np.errstate(invalid="ignore"):
            return [float(1 / np.exp(row - row.max()).sum()) for row in as_array(logits)]
    confidences: list[float] = (logits.amax(-1) - logits.logsumexp(-1)).exp().tolist()
    return confidences


class GuessConfidence:
    """The confidence of one round's guess so far."""

    def __init__(self, threshold: float) -> None:
        """Args:
        threshold: stop below it; 0 never stops.
        """
        self._threshold = threshold
        self._product = 1.0

    def ends_with(self, confidence: float) -> bool:
        """Take in the row of one more token; say whether that token is the last one."""
        self._product *= confidence
        # An unusable row (NaN) ends the guess elsewhere, by its token.
        return self._product < self._threshold
