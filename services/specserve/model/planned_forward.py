"""A forward in torch operations over a planned batch: any model, any device.

Plans the batch's geometry, hands it to the model, and keeps what a masked slot may hold harmless.
Knows plans and pools; knows no session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from specserve.model.attention import PagedBatch
from specserve.model.kv_pool import KvPool
from specserve.model.paged_batch import BatchPlan, plan_batch
from specserve.model.runner import SequenceSlice

logger = logging.getLogger(__name__)

RunPlan = Callable[[BatchPlan, PagedBatch], torch.Tensor]
"""Runs a planned batch; [R, head rows] logits."""


def model_forward(model: PreTrainedModel) -> RunPlan:
    """Return the model's own code as a forward over a planned batch."""

    def run(plan: BatchPlan, paged: PagedBatch) -> torch.Tensor:
        rows = plan.logit_rows
        output = model(
            input_ids=plan.token_ids.unsqueeze(0),
            position_ids=plan.positions.unsqueeze(0),
            use_cache=False,
            # No rows at all would leave some kernels without a shape: one is computed and dropped.
            logits_to_keep=rows if rows.numel() else 1,
            paged_batch=paged,
        )
        logits: torch.Tensor = output.logits[0]
        return logits[: rows.numel()]

    return run


class PlannedForward:
    """Plans each batch and runs it."""

    def __init__(self, run: RunPlan, *, row_by_row: bool) -> None:
        """Args:
        row_by_row: see `plan_batch`.
        """
        self._run = run
        self._row_by_row = row_by_row
        self._clear_tails = False
        self._unread: torch.Tensor | None = None
        """Whether what the last forward wrote is finite; read before the next one, when the device
        has long computed it."""

    @property
    def run(self) -> RunPlan:
        """What runs the planned batches."""
        return self._run

    def clears_tails(self) -> bool:
        """Whether some row has gone bad: a masked slot counts as 0 * value, and 0 * NaN is NaN, so
        what it left behind in freed blocks must not reach their next owner.
        """
        if self._unread is not None and not self._clear_tails and not bool(self._unread):
            logger.warning("non-finite keys or values: block tails are cleared from now on")
            self._clear_tails = True
        self._unread = None
        return self._clear_tails

    def watch(self, finite: torch.Tensor) -> None:
        """Take note, [], of whether what a forward has written is finite."""
        self._unread = finite

    def __call__(self, batch: Sequence[SequenceSlice], pool: KvPool) -> torch.Tensor:
        """Run a batch and write its keys and values; [R, head rows] logits."""
        plan = plan_batch(batch, pool, self._row_by_row)
        if self.clears_tails() and plan.tail_slots.size:
            pool.clear_slots(torch.from_numpy(plan.tail_slots).to(pool.device))
        paged = PagedBatch(plan, pool)
        logits = self._run(plan, paged)
        if not self._clear_tails:
            self.watch(paged.finite_flag())
        return logits
