"""Log-probabilities of the unmodified target distribution, for the rows that ask for them.

What OpenAI's `logprobs` shows: log-softmax before temperature and filters. Knows no keys, no wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specserve.model.ranking import exact_top
from specserve.model.sampler_ops import as_array
from specserve.speculation.scoring import RowLogprobs, TargetRow, TargetRowScore


def with_logprobs(
    logits: torch.Tensor, rows: Sequence[TargetRow], scores: Sequence[TargetRowScore]
) -> list[TargetRowScore]:
    """Return the scores with logprobs where the row's params ask for them and it is usable.

    Args:
        logits: [R, V] float32, as the model gave them.
    """
    asked = [
        i
        for i, (row, score) in enumerate(zip(rows, scores, strict=True))
        if row.params.num_logprobs >= 0 and score.is_usable
    ]
    if not asked:
        return list(scores)
    vocab_size = logits.shape[1]
    chosen = logits if len(asked) == len(rows) else logits[asked]
    sums = np.asarray(as_array(torch.logsumexp(chosen, dim=1)), np.float64)
    num_top = max(rows[i].params.num_logprobs for i in asked)
    top, top_ids = exact_top(chosen, max(1, num_top))
    drafts = [-1 if (draft := rows[i].draft_token_id) is None else draft for i in asked]
    known = [0 <= draft < vocab_size for draft in drafts]
    columns = [
        (draft if inside else 0, scores[i].replacement_token_id)
        for draft, inside, i in zip(drafts, known, asked, strict=True)
    ]
    wanted = torch.tensor(columns, device=logits.device)  # [asked, 2]
    picked = as_array(chosen.gather(1, wanted)).astype(np.float64) - sums[:, None]  # [asked, 2]
    result = list(scores)
    for j, i in enumerate(asked):
        num_logprobs = rows[i].params.num_logprobs
        result[i] = replace(
            scores[i],
            logprobs=RowLogprobs(
                draft=float(picked[j, 0]) if known[j] else math.nan,
                replacement=float(picked[j, 1]),
                top_token_ids=top_ids[j, :num_logprobs].astype(np.int32),
                top=(top[j, :num_logprobs] - sums[j]).astype(np.float32),
            ),
        )
    return result
