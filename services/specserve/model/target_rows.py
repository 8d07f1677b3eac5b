"""The target's sampled rows, by what they need: a short ranking, shared noise, or a whole row.

Each function scores the rows of a batch that `part` names and fills their places in `scores`.
Knows no session, no cache and no wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model.ranking import can_rank, rank
from specserve.model.sampler_ops import (
    as_array,
    coupled_draw_on_cpu,
    coupled_draws,
    residual_draws,
)
from specserve.speculation.draws import coupled_choices
from specserve.speculation.randomness import Purpose, keyed_uniforms
from specserve.speculation.scoring import (
    TargetRow,
    TargetRowScore,
    draft_support,
    noise_key,
    score_distribution,
    score_row,
    uniform_key,
)
from specserve.speculation.transforms import Distribution, distribution, transform
from specserve.speculation.types import AcceptanceRule

NUM_CANDIDATES = (256, 4096)
"""Most likely tokens looked at for top-p and min-p; a flatter row is ranked as a whole."""


def matched(row: TargetRow, token_id: int) -> TargetRowScore:
    """Score a greedy or coupled row: accepted iff the draft token is the target's own."""
    return TargetRowScore(1.0 if row.draft_token_id == token_id else 0.0, token_id)


def score_filtered(
    logits: torch.Tensor, rows: Sequence[TargetRow], part: list[int], scores: list[TargetRowScore]
) -> None:
    """Score rows with top-k, top-p or min-p over the few tokens these leave."""
    targets: dict[int, Distribution] = {}
    for num_candidates in NUM_CANDIDATES:
        missing = [i for i in part if i not in targets and can_rank(rows[i].params)]
        rankings = rank(logits, [rows[i].params for i in missing], missing, num_candidates)
        for i, ranked in zip(missing, rankings, strict=True):
            if ranked.is_exact:
                order = np.argsort(ranked.columns[: ranked.count])
                targets[i] = distribution(ranked.columns[order], ranked.log_weights[order])
    for i in part:
        if i not in targets:
            targets[i] = transform(as_array(logits[i]), rows[i].params, rows[i].row)
    coupled = [i for i in part if rows[i].params.rule is AcceptanceRule.COUPLED]
    choices = coupled_choices([noise_key(rows[i]) for i in coupled], [targets[i] for i in coupled])
    for i, token_id in zip(coupled, choices, strict=True):
        scores[i] = matched(rows[i], token_id)
    for i in part:
        if rows[i].params.rule is not AcceptanceRule.COUPLED:
            scores[i] = score_distribution(targets[i], rows[i])


def score_coupled(
    logits: torch.Tensor,
    rows: Sequence[TargetRow],
    part: list[int],
    largest: NDArray[np.floating],
    columns: NDArray[np.int64],
    scores: list[TargetRowScore],
) -> None:
    """Score coupled rows that sample from the whole vocabulary."""
    keys = [noise_key(rows[i]) for i in part]
    temperatures = [rows[i].params.temperature for i in part]
    if logits.device.type == "cpu":
        choices = [
            coupled_draw_on_cpu(as_array(logits[i]), int(columns[i]), temperature, key)
            for i, temperature, key in zip(part, temperatures, keys, strict=True)
        ]
    else:
        choices = coupled_draws(
            logits[part], largest[part], np.array(temperatures), np.array(keys, np.uint64)
        ).tolist()
    for i, token_id in zip(part, choices, strict=True):
        scores[i] = matched(rows[i], token_id)


def score_standard(
    logits: torch.Tensor,
    rows: Sequence[TargetRow],
    part: list[int],
    largest: NDArray[np.floating],
    scores: list[TargetRowScore],
) -> None:
    """Score standard rows that sample from the whole vocabulary."""
    vocab_size = logits.shape[1]
    drafted = np.full(len(part), -1, np.int64)
    q_rows: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    q_ids: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    q_probs: list[NDArray[np.float64]] = [np.zeros(0, np.float64)]
    for j, i in enumerate(part):
        draft_token_id = rows[i].draft_token_id
        if draft_token_id is None:
            continue
        if 0 <= draft_token_id < vocab_size:
            drafted[j] = draft_token_id
        ids, q = draft_support(rows[i])
        inside = (ids >= 0) & (ids < vocab_size)
        q_ids.append(ids[inside].astype(np.int64))
        q_probs.append(q[inside])
        q_rows.append(np.full(q_ids[-1].size, j, np.int64))
    keys = [uniform_key(rows[i]) for i in part]
    target_probs, columns = residual_draws(
        logits if len(part) == len(logits) else logits[part],
        largest[part],
        np.array([rows[i].params.temperature for i in part]),
        drafted,
        np.concatenate(q_rows),
        np.concatenate(q_ids),
        np.concatenate(q_probs),
        keyed_uniforms(keys, Purpose.REPLACE),
    )
    for j, i in enumerate(part):
        if columns[j] < 0:
            scores[i] = score_row(as_array(logits[i]), rows[i])
        else:
            scores[i] = TargetRowScore(float(target_probs[j]), int(columns[j]))
