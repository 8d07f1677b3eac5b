"""The device's sampler against the numpy reference, row by row, on a vocabulary of real size.

Draws over a whole head and a cut one, scores, edits, confidences and kept heads of rows. Knows both
samplers; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model.draft_confidence import row_confidences
from specserve.model.row_top import RowTops
from specserve.model.sampler import draw_proposals, score_rows
from specserve.speculation.scoring import DraftDraw, DraftRow, TargetRow, propose_row, score_row
from specserve.tools.gpu_check.sampler_rows import ROW_KINDS, draft_rows

SHARPNESS = 3.0
LARGEST_PROB_ERROR = 1e-9
"""Sums of float64 in another order differ by less; anything larger is a mistake."""
LARGEST_CONFIDENCE_ERROR = 1e-5
"""Share of the confidence: a device sums these in float32."""
SUPPORT_SIZE = 64


@dataclass(frozen=True, slots=True)
class SamplerReport:
    """What the comparison showed."""

    num_rows: int
    """Drawn over a whole head, drawn over a cut one, and scored."""
    num_different_draws: int
    """Rows with another draft token, or another q."""
    num_different_scores: int
    """Rows with another replacement."""
    largest_prob_error: float
    """Of the draft token's p."""
    largest_confidence_error: float
    """Of a row's largest probability, as a share of it."""
    num_different_tops: int
    """Rows whose kept head is not what is most likely."""
    num_changed_logits: int
    """Of other bits after draws and scores than before."""

    @property
    def passed(self) -> bool:
        """Whether the device says what the reference says, and leaves the logits as they were."""
        num_different = self.num_different_draws + self.num_different_scores
        return (
            num_different + self.num_different_tops + self.num_changed_logits == 0
            and self.largest_prob_error <= LARGEST_PROB_ERROR
            and self.largest_confidence_error <= LARGEST_CONFIDENCE_ERROR
        )


def compare_sampler(vocab_size: int, device: torch.device) -> SamplerReport:
    """Draw and score the same rows on the device and in numpy."""
    rng = np.random.default_rng(17)
    shape = (len(ROW_KINDS), vocab_size)
    whole = _Head(_rounded(SHARPNESS * rng.standard_normal(shape)), None, device, rng)
    kept = np.sort(rng.permutation(vocab_size)[: vocab_size // 2])
    cut = _Head(whole.logits[:, : kept.size].copy(), kept, device, rng)
    # Every other row has a guess, as all but the last of a block do.
    rows = [
        TargetRow(
            row.params,
            row.position,
            row.committed_length,
            row.row,
            draw.token_id if i % 2 else None,
            draw.support_token_ids,
            draw.support_weights,
            row.edits,
        )
        for i, (row, draw) in enumerate(zip(whole.rows, whole.draws, strict=True))
    ]
    targets = _rounded(whole.logits + rng.standard_normal(shape))
    on_device = torch.from_numpy(targets).to(device, copy=True)
    scores = score_rows(on_device, rows)
    wanted = [score_row(logits, row) for logits, row in zip(targets, rows, strict=True)]
    pairs = list(zip(scores, wanted, strict=True))
    heads = (whole, cut)
    return SamplerReport(
        num_rows=len(rows),
        num_different_draws=sum(head.num_different_draws() for head in heads),
        num_different_scores=sum(
            a.replacement_token_id != b.replacement_token_id for a, b in pairs
        ),
        largest_prob_error=_largest([a.target_prob - b.target_prob for a, b in pairs]),
        largest_confidence_error=_largest([head.confidence_error() for head in heads]),
        num_different_tops=sum(head.num_different_tops() for head in heads),
        num_changed_logits=_num_changed(on_device, targets)
        + sum(_num_changed(head.on_device, head.logits) for head in heads),
    )


class _Head:
    """Rows of a draft's logits, in numpy and on the device."""

    def __init__(
        self,
        logits: NDArray[np.float32],
        token_ids: NDArray[np.int64] | None,
        device: torch.device,
        rng: np.random.Generator,
    ) -> None:
        """Draw from each row by the reference.

        Args:
            logits: [R, V'].
            token_ids: [V'] ids of the columns when the head was cut.
        """
        self.logits = logits
        self.on_device = torch.from_numpy(logits).to(device, copy=True)
        self._columns = np.arange(logits.shape[1]) if token_ids is None else token_ids
        self._token_ids = None if token_ids is None else torch.from_numpy(token_ids).to(device)
        self.rows: list[DraftRow] = draft_rows(logits, self._columns, rng)
        self.draws = [
            propose_row(row_logits, row, SUPPORT_SIZE, token_ids)
            for row_logits, row in zip(logits, self.rows, strict=True)
        ]

    def num_different_draws(self) -> int:
        """Draw on the device; count the rows that differ."""
        draws = draw_proposals(self.on_device, self.rows, SUPPORT_SIZE, self._token_ids)
        return sum(_told(a) != _told(b) for a, b in zip(draws, self.draws, strict=True))

    def confidence_error(self) -> float:
        """Ask the device for confidences; return the largest error, as a share."""
        wide = self.logits.astype(np.float64)
        wanted = 1.0 / np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1)
        return float(np.abs(np.array(row_confidences(self.on_device)) / wanted - 1.0).max())

    def num_different_tops(self) -> int:
        """Keep the head of each row on the device; count those that hold another one."""
        tops = RowTops(self.on_device, SUPPORT_SIZE, self._token_ids)
        num_different = 0
        for i, logits in enumerate(self.logits):
            token_ids, values = tops.row(i)
            # Of equal logits any may be kept: what each id's logit is, and that none is twice.
            named = logits[np.searchsorted(self._columns, token_ids)]
            wanted = -np.sort(-logits)[:SUPPORT_SIZE]
            num_different += not (
                np.array_equal(values, wanted)
                and np.array_equal(named, wanted)
                and len(set(token_ids.tolist())) == SUPPORT_SIZE
            )
        return num_different


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to bfloat16, as heads' logits are: then many are equal."""
    rounded: NDArray[np.float32] = torch.from_numpy(values).bfloat16().float().numpy()
    return rounded


def _told(draw: DraftDraw) -> tuple[int, list[int], list[float]]:
    ids, weights = draw.support_token_ids, draw.support_weights
    return (
        draw.token_id,
        [] if ids is None else ids.tolist(),
        [] if weights is None else weights.tolist(),
    )


def _largest(errors: list[float]) -> float:
    return float(np.abs(errors).max())  # NaN wins


def _num_changed(on_device: torch.Tensor, before: NDArray[np.float32]) -> int:
    after = on_device.cpu().numpy()
    return int(np.count_nonzero(after.view(np.int32) != before.view(np.int32)))
