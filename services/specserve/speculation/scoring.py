"""One row on each side of a round: the draft's draw and the target's score, in numpy.

The reference that `model/sampler.py` (the tensor twin) is tested equal to, and its path for small
problems. Exactness rests on three things: q is the sparse distribution the draft drew from and
nothing else; the residual norm((p - q)+) is taken from that same q; no id with p = 0 is ever
returned. Knows logits and keys; knows no session and no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.errors import InvalidProposal
from specserve.speculation.draws import coupled_choices, inverse_cdf, residual
from specserve.speculation.randomness import Purpose, uniform
from specserve.speculation.row_edits import RowEdits, edit_row
from specserve.speculation.transforms import Distribution, is_greedy, transform
from specserve.speculation.types import AcceptanceRule, SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One draft token to draw: whose it is, and its keys."""

    params: SamplingParams
    position: int
    """Absolute index of the token this row predicts."""
    committed_length: int
    """Committed tokens at round start."""
    row: int
    """Which draft token of the round, 0..K-1."""
    edits: RowEdits | None = None
    """Penalties and bans after committed + draft[:row]; None edits nothing."""


@dataclass(frozen=True, slots=True)
class DraftDraw:
    """A drawn draft token and, for the standard rule, all of its q."""

    token_id: int
    """-1 when the row's logits were unusable: stop drafting here, this session only."""
    support_token_ids: NDArray[np.int32] | None = None
    """[k] most likely first; None for greedy and coupled."""
    support_weights: NDArray[np.float32] | None = None
    """[k] > 0; q is weight / float64 sum of the weights."""


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One row of a verify block to score: row i predicts the token that draft token i guesses."""

    params: SamplingParams
    position: int
    """Absolute index of the token this row predicts."""
    committed_length: int
    """Committed tokens at round start; for decode-ahead, those decoded so far count."""
    row: int
    """0..K within the round; always 0 for decode-ahead."""
    draft_token_id: int | None
    """The guess; None on the bonus row and for decode-ahead."""
    draft_support_token_ids: NDArray[np.int32] | None = None
    """[k] support of q; needed by the standard rule with a guess."""
    draft_support_weights: NDArray[np.float32] | None = None
    """[k] >= 0, padding 0; any id may appear in padding."""
    edits: RowEdits | None = None
    """Penalties and bans after committed + draft[:row]; None edits nothing."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-softmax of the unmodified logits of one row."""

    draft: float
    """Of the draft token; NaN when there is none or its id is out of range."""
    replacement: float
    top_token_ids: NDArray[np.int32]
    """[n] most likely first, ties by lowest id."""
    top: NDArray[np.float32]
    """[n]"""


@dataclass(frozen=True, slots=True)
class TargetRowScore:
    """One row of a verify block, reduced to scalars."""

    target_prob: float
    """p of the draft token, 0.0 where there is none; 1.0 or 0.0 for greedy and coupled."""
    replacement_token_id: int
    """What to commit if the round ends here; -1 when the row's logits were unusable, -2 when its
    constraints allow no token."""
    logprobs: RowLogprobs | None = None
    """For rows whose params ask for it (num_logprobs >= 0)."""

    @property
    def is_usable(self) -> bool:
        """False where the round cannot end at this row; only its own session is concerned."""
        return self.replacement_token_id >= 0


def noise_key(row: DraftRow | TargetRow) -> tuple[int, int, int]:
    """Return (seed, choice, position): the key of a row's noise in the coupled rule."""
    return row.params.seed, row.params.choice, row.position


def uniform_key(row: DraftRow | TargetRow) -> tuple[int, int, int, int]:
    """Return (seed, choice, committed_length, row): the key of a row's uniforms."""
    return row.params.seed, row.params.choice, row.committed_length, row.row


def propose_row(
    logits: NDArray[np.floating],
    row: DraftRow,
    draft_sample_top_k: int = 64,
    logit_token_ids: NDArray[np.int64] | None = None,
) -> DraftDraw:
    """Draw one draft token from the draft's own top-k of the transformed distribution.

    Args:
        logits: [V'] of the draft.
        logit_token_ids: [V'] ascending ids of the columns when the head was cut.

    Raises:
        UnusableLogits: NaN or +inf anywhere, or nothing finite.
    """
    if row.edits is not None:
        logits = edit_row(logits, row.edits, logit_token_ids)
    full = transform(logits, row.params, row.row)
    # Ranked by (logit descending, id ascending), on the wire too: columns ascend, sort is stable.
    columns = full.token_ids[(-logits[full.token_ids]).argsort(kind="stable")]
    columns = columns[:draft_sample_top_k]
    log_weights = full.log_weights[full.token_ids.searchsorted(columns)]
    token_ids = columns if logit_token_ids is None else logit_token_ids[columns]
    return draw_from(row, token_ids, log_weights)


def draw_from(
    row: DraftRow, token_ids: NDArray[np.int64], log_weights: NDArray[np.float64]
) -> DraftDraw:
    """Draw one draft token from a ranked support: the whole of q.

    Args:
        token_ids: [k] most likely first.
        log_weights: [k]; the first is 0.
    """
    if is_greedy(row.params):
        return DraftDraw(int(token_ids[0]))
    if row.params.rule is AcceptanceRule.COUPLED:
        candidates = Distribution(token_ids, log_weights, np.exp(log_weights))
        return DraftDraw(coupled_choices([noise_key(row)], [candidates])[0])
    weights = np.exp(log_weights).astype(np.float32)
    # A weight that float32 flushes to 0 is not in q: the token cannot be drawn.
    weights = weights[: int(np.count_nonzero(weights))]
    support = token_ids[: weights.size].astype(np.int32)
    index = inverse_cdf(weights, uniform(*uniform_key(row), Purpose.DRAFT))
    return DraftDraw(int(support[index]), support, weights)


def score_row(logits: NDArray[np.floating], row: TargetRow) -> TargetRowScore:
    """Score one row of a verify block: p of the draft token and what replaces it.

    Args:
        logits: [V] of the target.

    Raises:
        UnusableLogits: NaN or +inf anywhere, or nothing finite.
        InvalidProposal: the standard rule got a draft token without its q.
    """
    if row.edits is not None:
        logits = edit_row(logits, row.edits)
    return score_distribution(transform(logits, row.params, row.row), row)


def score_distribution(target: Distribution, row: TargetRow) -> TargetRowScore:
    """Score one row from its target distribution; see score_row."""
    drafted = row.draft_token_id
    if is_greedy(row.params) or row.params.rule is not AcceptanceRule.STANDARD:
        own = (
            int(target.token_ids[0])
            if is_greedy(row.params)
            else coupled_choices([noise_key(row)], [target])[0]
        )
        return TargetRowScore(1.0 if drafted == own else 0.0, own)
    u = uniform(*uniform_key(row), Purpose.REPLACE)
    weights, target_prob = target.probs, 0.0
    if drafted is not None:
        target_prob = target.prob(drafted)
        weights = residual(target, *draft_support(row))
    return TargetRowScore(target_prob, int(target.token_ids[inverse_cdf(weights, u)]))


def draft_support(row: TargetRow) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return ids and probabilities of a row's q, padding dropped.

    Raises:
        InvalidProposal: q is missing, misshapen, or has no positive finite sum.
    """
    ids, weights = row.draft_support_token_ids, row.draft_support_weights
    if ids is None or weights is None:
        raise InvalidProposal(f"row {row.row}: the standard rule needs draft_probs")
    if ids.shape != weights.shape or ids.ndim != 1:
        raise InvalidProposal(f"row {row.row}: q has ids {ids.shape}, weights {weights.shape}")
    total = float(weights.sum(dtype=np.float64))
    if not 0.0 < total < np.inf or float(weights.min()) < 0.0:
        raise InvalidProposal(f"row {row.row}: the weights of q must be >= 0 with a positive sum")
    positive = weights > 0.0
    return ids[positive], weights[positive].astype(np.float64) / total
