"""The values that the maths takes and gives. Knows numpy; knows no model and no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.errors import InvalidProposal
from specserve.speculation.constraints import TokenConstraints

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: logits / T would overflow float32."""


class AcceptanceRule(StrEnum):
    """How a draft token is accepted (design: three exact rules, one wire shape)."""

    GREEDY = "greedy"
    STANDARD = "standard"
    COUPLED = "coupled"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The distribution a session samples from; fixed for the session's life."""

    rule: AcceptanceRule
    """`greedy` iff temperature is 0; `auto` is resolved before this value is made."""
    seed: int
    """64-bit unsigned seed of the request."""
    choice: int
    """Number of this choice across the whole body: two prompts never share randomness."""
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end decode-ahead on the target (EOS and the request's own); the cut is elsewhere."""
    num_logprobs: int = -1
    """Top log-probabilities wanted per emitted token; 0 means the chosen one only, -1 none."""
    constraints: TokenConstraints | None = None
    """Penalties, biases and bans; None edits no logit."""


@dataclass(frozen=True, slots=True)
class SparseProbs:
    """Draft distributions by their support: k (id, weight) pairs a row *are* all of q.

    q(x) is the float32 weight divided by the float64 sum of its row's weights, on both sides.
    """

    token_ids: NDArray[np.int32]
    """[K, k]; padding has weight 0."""
    weights: NDArray[np.float32]
    """[K, k], >= 0, each row's sum > 0."""

    def __post_init__(self) -> None:
        if self.token_ids.shape != self.weights.shape or self.token_ids.ndim != 2:
            raise InvalidProposal(
                f"draft_probs: ids {self.token_ids.shape} and weights {self.weights.shape} "
                "must be the same [K, k]"
            )


class Proposal(NamedTuple):
    """What a proposer guessed for one round. A value: nothing to undo on rejection."""

    draft_token_ids: tuple[int, ...]
    """The num_draft_tokens guessed tokens, in order; may be empty."""
    draft_probs: SparseProbs | None
    """[K, k] q of each token; None for greedy and coupled, which need none."""


class TargetScores(NamedTuple):
    """The target's answer for one round: K + 1 rows reduced to scalars."""

    target_probs: Sequence[float]
    """[K]; p of draft token i, 1.0 or 0.0 by equality for greedy and coupled."""
    replacement_token_ids: tuple[int, ...]
    """[K + 1]; what to commit if the round ends at this row (the last one is the bonus)."""


class Verification(NamedTuple):
    """The outcome of one round."""

    num_accepted: int
    """Draft tokens accepted, 0..K."""
    next_token_id: int
    """The recovered token if num_accepted < K, else the bonus token."""
