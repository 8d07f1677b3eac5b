"""A decode step whose shape never changes: what a CUDA graph can replay.

A ragged batch is filled up to a shape of (sequences, new tokens each, blocks each): a short
sequence repeats its last token, a missing one is another's repetition. Both write what was written
anyway, to the same slots, and are read by nobody. Knows plans and pools; knows no session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model.attention import PagedBatch
from specserve.model.kv_pool import KvPool
from specserve.model.paged_batch import MAX_PADDED_TOKENS, BatchPlan, SequenceGroup
from specserve.model.planned_forward import RunPlan
from specserve.model.runner import SequenceSlice


@dataclass(frozen=True, slots=True)
class StepShape:
    """What every batch of one static step is filled up to."""

    num_sequences: int
    num_queries: int
    """New tokens a sequence."""
    num_blocks: int
    """KV blocks a sequence."""

    @staticmethod
    def of(batch: Sequence[SequenceSlice], block_size: int) -> StepShape | None:
        """Return the shape that a batch is filled up to; None for what is no decode step."""
        counts = [len(part.token_ids) for part in batch]
        if not batch or max(counts) > MAX_PADDED_TOKENS:
            return None
        longest = max(part.start_position + len(part.token_ids) for part in batch)
        return StepShape(
            _power_of_two(len(batch)), max(counts), _power_of_two(-(-longest // block_size))
        )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class StaticStep:
    """One shape's tensors, and the forward over them."""

    def __init__(self, run: RunPlan, pool: KvPool, shape: StepShape) -> None:
        self.shape = shape
        self._run = run
        self._pool = pool
        rows = shape.num_sequences * shape.num_queries
        self._sizes = (rows, rows, rows, shape.num_sequences * shape.num_blocks)
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int64, device=pool.device)
        token_ids, positions, slots, block_ids = self._buffer.split(self._sizes)
        self._plan = BatchPlan(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            first_slot=None,
            groups=(
                SequenceGroup(
                    first_row=0,
                    num_rows=rows,
                    num_sequences=shape.num_sequences,
                    num_queries=shape.num_queries,
                    num_keys=shape.num_blocks * pool.block_size,
                    first_slot=None,
                    block_ids=block_ids,
                    query_rows=None,
                    output_rows=None,
                    positions=positions.view(shape.num_sequences, shape.num_queries),
                    has_spare_keys=True,
                ),
            ),
            logit_rows=torch.arange(rows, device=pool.device),
            all_rows_wanted=True,
            tail_slots=np.zeros(0, np.int64),
        )

    def fill(self, batch: Sequence[SequenceSlice]) -> NDArray[np.int64]:
        """Write a batch into the tensors, in one transfer.

        Returns:
            [R] rows of the step whose logits the batch wants, in its order.
        """
        shape, size = self.shape, self._pool.block_size
        filled = [*batch, *[batch[0]] * (shape.num_sequences - len(batch))]
        counts = np.array([len(part.token_ids) for part in filled])[:, None]  # [B, 1]
        starts = np.array([part.start_position for part in filled])[:, None]  # [B, 1]
        inside = np.minimum(np.arange(shape.num_queries), counts - 1)  # [B, n]
        positions = starts + inside
        token_ids = np.zeros((shape.num_sequences, shape.num_queries), np.int64)
        block_ids = np.full(
            (shape.num_sequences, shape.num_blocks), self._pool.padding_block, np.int64
        )
        for index, part in enumerate(filled):
            token_ids[index] = np.asarray(part.token_ids)[inside[index]]
            used = -(-(part.start_position + len(part.token_ids)) // size)
            block_ids[index, :used] = part.block_table[:used]
        slots = np.take_along_axis(block_ids, positions // size, axis=1) * size + positions % size
        parts = (token_ids, positions, slots, block_ids)
        host = np.concatenate([part.reshape(-1) for part in parts])
        self._buffer.copy_(torch.from_numpy(host))
        return np.concatenate(
            [
                index * shape.num_queries
                + np.arange(len(part.token_ids) - part.num_logit_rows, len(part.token_ids))
                for index, part in enumerate(batch)
            ]
        )

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward over what was filled in.

        Returns:
            [B * n, head rows] logits, and whether the keys and values written are finite, [].
        """
        paged = PagedBatch(self._plan, self._pool)
        logits = self._run(self._plan, paged)
        return logits, paged.finite_flag()
