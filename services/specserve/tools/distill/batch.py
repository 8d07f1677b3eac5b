"""Turns rows of sampled text into packed inputs and sparse targets over a cut head.

Knows the text and the head's vocabulary; knows no model.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specserve.tools.distill.loss import SparseTargets
from specserve.tools.distill.student import PackedRows, pack_rows
from specserve.tools.distill.text import FloatArray, IntArray, Row


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """How sampled text becomes targets."""

    sampled_weight: float
    """Share of a drawn token in the cross-entropy target; the rest is the top ids."""
    greedy_weight: float
    """The same of a token that was the most likely one."""
    prompt_weight: float
    """Weight of a user-turn position (hard target) relative to an answer position."""
    prompt_skip: int
    """Leading prompt tokens that are never trained on: the part all rows share."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed batch."""

    packed: PackedRows
    """Inputs: each row without its last token."""
    selected: Tensor
    """[T'] indices of the packed tokens whose next token is trained."""
    targets: SparseTargets
    """At the selected positions."""

    def to(self, device: torch.device) -> "Batch":
        """Return a copy on a device."""
        return Batch(self.packed.to(device), self.selected.to(device), self.targets.to(device))


def column_of(vocab: tuple[int, ...], vocab_size: int) -> IntArray:
    """Map token id -> column of the cut head, -1 where it has none."""
    columns = np.full(vocab_size, -1, np.int64)
    columns[list(vocab)] = np.arange(len(vocab))
    return columns


def _normalised(probs: FloatArray) -> FloatArray:
    total = probs.sum(-1, keepdims=True)
    normalised: FloatArray = np.divide(probs, total, out=np.zeros_like(probs), where=total > 0)
    return normalised


def make_batch(rows: list[Row], columns: IntArray, settings: TargetSettings) -> Batch:
    """Pack rows and build their targets.

    User-turn tokens that were sampled from the target have no log-probabilities: they are hard
    targets and take no part in the overlap term. Given prompts are only read.
    """
    ids, probs, overlaps, weights, selected = [], [], [], [], []
    offset = 0
    for row in rows:
        skip = max(1, min(settings.prompt_skip, len(row.prompt)))  # nothing foretells the first
        if not row.is_prompt_sampled:
            skip = len(row.prompt)
        user, answer = row.prompt[skip:], row.answer
        width = row.top_ids.shape[1] + 1
        sampled = np.concatenate([user, answer])
        row_columns = np.zeros((len(sampled), width), np.int64) - 1
        row_columns[:, 0] = columns[sampled]
        row_columns[len(user) :, 1:] = columns[row.top_ids]
        top_probs = np.zeros((len(sampled), width), np.float32)
        top_probs[len(user) :, 1:] = np.exp(row.top_logprobs)
        top_probs[row_columns < 0] = 0
        soft = _normalised(top_probs)
        weight = settings.greedy_weight if row.is_greedy else settings.sampled_weight
        share = np.where(np.arange(len(sampled)) < len(user), 1.0, weight)
        hard = np.zeros_like(soft)
        hard[:, 0] = row_columns[:, 0] >= 0
        mixed = share[:, None].astype(np.float32) * hard + (1 - share[:, None]) * soft
        ids.append(np.maximum(row_columns, 0))
        probs.append(_normalised(mixed.astype(np.float32)))
        overlaps.append(top_probs)
        row_weights = np.ones(len(sampled), np.float32)
        row_weights[: len(user)] = settings.prompt_weight
        weights.append(row_weights)
        selected.append(offset + skip - 1 + np.arange(len(sampled)))
        offset += len(row.prompt) + len(answer) - 1
    targets = SparseTargets(
        columns=torch.from_numpy(np.concatenate(ids)),
        probs=torch.from_numpy(np.concatenate(probs)),
        overlap_probs=torch.from_numpy(np.concatenate(overlaps)),
        weights=torch.from_numpy(np.concatenate(weights)),
    )
    inputs = [torch.from_numpy(np.concatenate([row.prompt, row.answer])[:-1]) for row in rows]
    return Batch(pack_rows(inputs), torch.from_numpy(np.concatenate(selected)), targets)
