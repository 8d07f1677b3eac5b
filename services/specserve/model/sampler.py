"""Draft draws and target scores for a ragged batch: the tensor twin of `speculation/scoring.py`.

Rows of one batch may belong to any mix of sessions, rules and temperatures. Each goes the cheapest
exact way: greedy rows cost one argmax, filtered rows a top-k and some numpy over a small support,
only unfiltered sampling touches a whole row in float64. A row with unusable logits is marked in its
own result (token id -1); its neighbours never notice. Knows no session, no cache and no wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specserve.model.logit_edits import edited, has_edits
from specserve.model.logprobs import with_logprobs
from specserve.model.ranking import can_rank, rank
from specserve.model.sampler_ops import as_array, as_ids, row_argmax
from specserve.model.small_rows import UNUSABLE_DRAW, UNUSABLE_SCORE, draw_small, score_small
from specserve.model.target_rows import matched, score_coupled, score_filtered, score_standard
from specserve.speculation.draws import coupled_choices
from specserve.speculation.scoring import (
    DraftDraw,
    DraftRow,
    RowLogprobs,
    TargetRow,
    TargetRowScore,
    draw_from,
    noise_key,
    propose_row,
)
from specserve.speculation.transforms import (
    Distribution,
    distribution,
    is_filtered,
    is_greedy,
)
from specserve.speculation.types import AcceptanceRule

__all__ = [
    "DraftDraw",
    "DraftRow",
    "RowLogprobs",
    "TargetRow",
    "TargetRowScore",
    "draw_proposals",
    "score_rows",
]

SMALL_VOCAB_SIZE = 512
"""CPU rows up to this long are matrices of numpy (small_rows.py): tensor calls would cost more."""
NOTHING_ALLOWED = TargetRowScore(0.0, -2)
CHUNK_NUM_ELEMENTS = 1 << 20
"""Elements of a float64 temporary on CPU (8 MiB): more would leave the caches."""


def draw_proposals(
    logits: torch.Tensor,
    rows: Sequence[DraftRow],
    top_k: int,
    logit_token_ids: torch.Tensor | None = None,
) -> list[DraftDraw]:
    """Draw one draft token per row from the draft's own top-k of the transformed distribution.

    Args:
        logits: [R, V'] float32.
        top_k: draft_sample_top_k; the support of q has at most this many tokens.
        logit_token_ids: [V'] int64 ascending ids of the columns when the head was cut.

    Returns:
        R draws; token_id -1 where a row was unusable, or its constraints allow no token.
    """
    ids = None if logit_token_ids is None else as_ids(logit_token_ids)
    if has_edits(rows):
        with edited(logits, rows, ids) as plain:
            return draw_proposals(logits, plain, top_k, logit_token_ids)
    if _is_small(logits):
        return draw_small(as_array(logits), rows, top_k, ids)
    largest, columns = row_argmax(logits)
    usable = np.isfinite(largest)
    draws = [UNUSABLE_DRAW] * len(rows)
    sampled: list[int] = []
    for i, row in enumerate(rows):
        if not usable[i]:
            continue
        if is_greedy(row.params):
            draws[i] = DraftDraw(int(columns[i] if ids is None else ids[columns[i]]))
        elif can_rank(row.params):
            sampled.append(i)
        else:
            draws[i] = propose_row(as_array(logits[i]), row, top_k, ids)
    if not sampled:
        return draws
    coupled: list[int] = []
    candidates: list[Distribution] = []
    rankings = rank(logits, [rows[i].params for i in sampled], sampled, top_k)
    for i, ranked in zip(sampled, rankings, strict=True):
        kept = min(ranked.count, top_k)
        token_ids = ranked.columns[:kept] if ids is None else ids[ranked.columns[:kept]]
        if rows[i].params.rule is AcceptanceRule.COUPLED:
            coupled.append(i)
            candidates.append(distribution(token_ids, ranked.log_weights[:kept]))
        else:
            draws[i] = draw_from(rows[i], token_ids, ranked.log_weights[:kept])
    choices = coupled_choices([noise_key(rows[i]) for i in coupled], candidates)
    for i, token_id in zip(coupled, choices, strict=True):
        draws[i] = DraftDraw(token_id)
    return draws


def score_rows(logits: torch.Tensor, rows: Sequence[TargetRow]) -> list[TargetRowScore]:
    """Score the rows of many verify blocks: p of each draft token, and what replaces it.

    Args:
        logits: [R, V] float32; -inf bans a token.

    Returns:
        R scores; `is_usable` is False where a row held NaN, +inf or nothing finite, or where its
        constraints leave nothing, and only there.

    Raises:
        InvalidProposal: a standard row with a draft token has no proper q. Check calls on arrival
            (acceptance.draft_token_probs): here it would fail the whole batch.
    """
    if has_edits(rows):
        with edited(logits, rows) as plain:
            scores = _scores(logits, plain)
        return with_logprobs(logits, rows, _tell_apart(logits, scores))
    return with_logprobs(logits, rows, _scores(logits, rows))


def _scores(logits: torch.Tensor, rows: Sequence[TargetRow]) -> list[TargetRowScore]:
    """Score rows without edits, log-probabilities apart."""
    if _is_small(logits):
        return score_small(as_array(logits), rows)
    largest, columns = row_argmax(logits)
    usable = np.isfinite(largest)
    scores = [UNUSABLE_SCORE] * len(rows)
    filtered: list[int] = []
    coupled: list[int] = []
    standard: list[int] = []
    for i, row in enumerate(rows):
        if not usable[i]:
            continue
        if is_greedy(row.params):
            scores[i] = matched(row, int(columns[i]))
        elif is_filtered(row.params):
            filtered.append(i)
        elif row.params.rule is AcceptanceRule.COUPLED:
            coupled.append(i)
        else:
            standard.append(i)
    for part in _chunks(filtered, logits):
        score_filtered(logits, rows, part, scores)
    for part in _chunks(coupled, logits):
        score_coupled(logits, rows, part, largest, columns, scores)
    for part in _chunks(standard, logits):
        score_standard(logits, rows, part, largest, scores)
    return scores


def _tell_apart(logits: torch.Tensor, scores: list[TargetRowScore]) -> list[TargetRowScore]:
    """Mark the rows that constraints left without a token, by the logits as the model gave them."""
    lost = [i for i, score in enumerate(scores) if not score.is_usable]
    if lost:
        largest, _ = row_argmax(logits[lost])
        for i, value in zip(lost, largest, strict=True):
            scores[i] = NOTHING_ALLOWED if np.isfinite(value) else scores[i]
    return scores


def _is_small(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu" and logits.shape[1] <= SMALL_VOCAB_SIZE


def _chunks(indices: list[int], logits: torch.Tensor) -> list[list[int]]:
    size = max(1, CHUNK_NUM_ELEMENTS // logits.shape[1])
    if logits.device.type != "cpu":
        size *= 32
    return [indices[start : start + size] for start in range(0, len(indices), size)]
