"""Deciding a round: what the orchestrator walks.

The target reduces every row to two scalars (`speculation/scoring.py`), so deciding is O(K). Three
exact rules share the walk: `standard` is Algorithm 1 of Leviathan et al., 2023 (arXiv:2211.17192),
`greedy` its limit at temperature 0, `coupled` that of Daliri et al., 2024 (arXiv:2408.07978). Knows
proposals, scores and uniforms; knows no logits, no model and no network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specserve.errors import InvalidProposal
from specserve.speculation.types import (
    AcceptanceRule,
    Proposal,
    SparseProbs,
    TargetScores,
    Verification,
)


class Uniforms(Protocol):
    """Numbers in [0, 1) by row."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> float: ...


def accept(
    proposal: Proposal,
    scores: TargetScores,
    uniforms: Uniforms,
    rule: AcceptanceRule,
    token_probs: Sequence[float] | None = None,
) -> Verification:
    """Accept a prefix of the draft and name the one token after it.

    Args:
        proposal: K draft tokens; with the standard rule also q, one row a token.
        scores: [K] probabilities of the draft tokens and [K + 1] replacements.
        uniforms: at least [K] in [0, 1), purpose ACCEPT; unused by greedy and coupled.
        token_probs: [K] what `draft_token_probs` said of this proposal, if it was asked before.

    Raises:
        InvalidProposal: shapes disagree, q is missing, or q gives a token it drew no weight.
    """
    num_draft_tokens = len(proposal.draft_token_ids)
    if (
        len(scores.target_probs) != num_draft_tokens
        or len(scores.replacement_token_ids) != num_draft_tokens + 1
    ):
        raise InvalidProposal(
            f"{num_draft_tokens} draft tokens need as many target_probs and one replacement more, "
            f"got {len(scores.target_probs)} and {len(scores.replacement_token_ids)}"
        )
    target_probs = scores.target_probs
    if num_draft_tokens == 0:
        num_accepted = 0
    elif rule is AcceptanceRule.STANDARD:
        if len(uniforms) < num_draft_tokens:
            raise InvalidProposal(f"{num_draft_tokens} uniforms wanted, got {len(uniforms)}")
        q = _draft_token_probs(proposal) if token_probs is None else token_probs
        num_accepted = _count_accepted(q, target_probs, uniforms)
    else:
        # The target compared the tokens; p is 1.0 where they are equal and 0.0 where not.
        num_accepted = next(
            (row for row, p in enumerate(target_probs) if p < 1.0), num_draft_tokens
        )
    return Verification(num_accepted, scores.replacement_token_ids[num_accepted])


def _count_accepted(
    token_probs: Sequence[float],
    target_probs: Sequence[float],
    uniforms: Uniforms,
) -> int:
    for row, (p, q) in enumerate(zip(target_probs, token_probs, strict=True)):
        if q == 0.0 and p > 0.0:
            # Without its q there is no exact test, and u * 0 < p would accept it always.
            raise InvalidProposal(f"draft token {row} has no weight in its own draft_probs")
        # Any u < 1 accepts then (u * q rounds below q), so it need not be drawn.
        if 0.0 < q <= p:
            continue
        # Accept with min(1, p / q), multiplied out: q can be tiny.
        # Strictly less: a token with p = 0 must never be accepted, not even for u = 0.
        if not float(uniforms[row]) * q < p:
            return row
    return len(target_probs)


def draft_token_probs(proposal: Proposal) -> list[float]:
    """Compute q of each draft token: its weight over the float64 sum of its row's weights.

    The check to make when a proposal arrives: one that passes here costs no request later.

    Returns:
        K numbers in (0, 1].

    Raises:
        InvalidProposal: q is missing or misshapen, a row has no positive finite sum, or a token has
            no weight in its own row.
    """
    q = _draft_token_probs(proposal)
    if 0.0 in q:
        raise InvalidProposal(f"draft token {q.index(0.0)} has no weight in its own draft_probs")
    return q


def _draft_token_probs(proposal: Proposal) -> list[float]:
    drafted = proposal.draft_token_ids
    if proposal.draft_probs is None:
        raise InvalidProposal("the standard rule needs draft_probs, and there are none")
    probs = proposal.draft_probs
    if len(probs.token_ids) != len(drafted):
        raise InvalidProposal(f"{len(drafted)} draft tokens but {len(probs.token_ids)} rows of q")
    row_sums = row_weight_sums(probs)
    matches = probs.token_ids == np.array(drafted, np.int64)[:, None]
    weights = (probs.weights * matches).sum(axis=1, dtype=np.float64)
    q: list[float] = (weights / row_sums).tolist()
    return q


def row_weight_sums(probs: SparseProbs) -> NDArray[np.float64]:
    """Sum the weights of each row in float64, the divisor of q on both sides.

    Raises:
        InvalidProposal: a weight is negative or NaN, or a row's sum is not positive and finite.
    """
    weights = probs.weights
    sums: NDArray[np.float64] = weights.sum(axis=1, dtype=np.float64)
    # A NaN fails its row's test.
    if not all(0.0 < total < math.inf for total in sums.tolist()) or (
        weights.size and weights.min() < 0.0
    ):
        raise InvalidProposal(
            "draft_probs: weights must be >= 0 with a positive finite sum per row"
        )
    return sums
