"""The geometry of one forward: which token goes to which slot, and who attends to what.

Turns a ragged batch of `SequenceSlice` into index tensors once, so that the attention of every
layer only gathers and multiplies. Knows no model and no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model.kv_pool import KvPool
from specserve.model.runner import SequenceSlice

MAX_PADDED_TOKENS = 16
"""Sequences with at most this many new tokens share a padded shape; longer ones run alone."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Sequences whose attention runs as one call: B sequences, n queries each, L keys each."""

    first_row: int
    """Row of the flattened batch where the group's tokens start."""
    num_rows: int
    """Tokens of the group, without padding."""
    num_sequences: int
    """B"""
    num_queries: int
    """n: the most new tokens of any of its sequences."""
    num_keys: int
    """L: exact for one sequence, a multiple of the block size for several."""
    first_slot: int | None
    """One sequence in consecutive blocks: where its keys start in the pool; nothing is copied."""
    block_ids: torch.Tensor | None
    """[B * blocks] otherwise."""
    query_rows: torch.Tensor | None
    """[B * n] rows (from first_row) that fill the padded queries; None when nothing is padded."""
    output_rows: torch.Tensor | None
    """[num_rows] where each real row lies among the padded ones; None when nothing is padded."""
    positions: torch.Tensor
    """[B, n] position of each query in its sequence."""
    has_spare_keys: bool = False
    """Keys are gathered beyond the end of even the longest sequence."""

    @property
    def is_masked(self) -> bool:
        """Whether some query must not see some gathered key (without a sliding window)."""
        return self.has_spare_keys or self.num_sequences > 1 or self.num_queries > 1


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A flattened batch, ordered so that each group's rows are consecutive."""

    token_ids: torch.Tensor
    """[T]"""
    positions: torch.Tensor
    """[T] position id of each token in its own sequence."""
    slots: torch.Tensor
    """[T] pool slot that each token's keys and values are written to."""
    first_slot: int | None
    """Set when the slots are consecutive: a plain slice is written then."""
    groups: tuple[SequenceGroup, ...]
    logit_rows: torch.Tensor
    """[R] rows whose logits are wanted, in the caller's order."""
    all_rows_wanted: bool
    """Whether logit_rows is 0 ... T - 1."""
    tail_slots: NDArray[np.int64]
    """Slots behind each sequence's end within its last block: gathered, masked, never meant."""


def plan_batch(batch: Sequence[SequenceSlice], pool: KvPool, row_by_row: bool = False) -> BatchPlan:
    """Lay out one forward over the pool.

    Args:
        row_by_row: attend from each token of a short slice by itself, over exactly its own keys.
            The products then have the shapes they have when that token is decoded alone, and
            their results the same bits: slower, and independent of neighbours.
    """
    if row_by_row:
        batch = _split_rows(batch)
        order = list(range(len(batch)))
        groups = [[index] for index in order]
    else:
        groups, order = _group(batch, pool.block_size)
    size = pool.block_size
    token_ids: list[int] = []
    positions: list[NDArray[np.int64]] = []
    slots: list[NDArray[np.int64]] = []
    tails: list[NDArray[np.int64]] = []
    starts: dict[int, int] = {}
    for index in order:
        part = batch[index]
        starts[index] = len(token_ids)
        token_ids.extend(part.token_ids)
        where = np.arange(part.start_position, part.start_position + len(part.token_ids))
        table = np.asarray(part.block_table, dtype=np.int64)
        positions.append(where)
        slots.append(table[where // size] * size + where % size)
        end = int(where[-1]) + 1
        tails.append(table[(end - 1) // size] * size + np.arange((end - 1) % size + 1, size))
    logit_rows = [
        row
        for index, part in enumerate(batch)
        for row in range(
            starts[index] + len(part.token_ids) - part.num_logit_rows,
            starts[index] + len(part.token_ids),
        )
    ]
    all_slots = np.concatenate(slots)
    consecutive = bool((np.diff(all_slots) == 1).all())
    return BatchPlan(
        token_ids=_tensor(token_ids, pool.device),
        positions=_tensor(np.concatenate(positions), pool.device),
        slots=_tensor(all_slots, pool.device),
        first_slot=int(all_slots[0]) if consecutive else None,
        groups=tuple(_lay_out(batch, members, starts[members[0]], pool) for members in groups),
        logit_rows=_tensor(logit_rows, pool.device),
        all_rows_wanted=logit_rows == list(range(len(token_ids))),
        tail_slots=np.concatenate(tails),
    )


def _split_rows(batch: Sequence[SequenceSlice]) -> list[SequenceSlice]:
    """Cut short slices into single tokens; each sees what those before it write."""
    rows = []
    for part in batch:
        count = len(part.token_ids)
        if count > MAX_PADDED_TOKENS:
            rows.append(part)
            continue
        for index, token_id in enumerate(part.token_ids):
            scored = int(index >= count - part.num_logit_rows)
            position = part.start_position + index
            rows.append(SequenceSlice((token_id,), position, part.block_table, scored))
    return rows


def _group(batch: Sequence[SequenceSlice], block_size: int) -> tuple[list[list[int]], list[int]]:
    """Choose which sequences run together: short ones of like length; long ones alone."""
    lengths = [part.start_position + len(part.token_ids) for part in batch]
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(batch)), key=lambda i: -lengths[i]):
        if len(batch[index].token_ids) > MAX_PADDED_TOKENS:
            groups.insert(0, [index])
            continue
        # Padding at most doubles what is gathered.
        fits = 2 * (lengths[index] + block_size) >= longest
        if longest == 0 or not fits:
            groups.append([index])
            longest = lengths[index]
        else:
            groups[-1].append(index)
    return groups, [index for members in groups for index in members]


def _lay_out(
    batch: Sequence[SequenceSlice], members: list[int], first_row: int, pool: KvPool
) -> SequenceGroup:
    """Make the index tensors of one group."""
    size = pool.block_size
    counts = np.array([len(batch[i].token_ids) for i in members])
    begins = np.array([batch[i].start_position for i in members])
    num_queries = int(counts.max())
    num_rows = int(counts.sum())
    # A padded query repeats its sequence's last one: it sees at least one key, so no NaN arises.
    inside = np.minimum(np.arange(num_queries)[None, :], counts[:, None] - 1)  # [B, n]
    padded = num_rows != len(members) * num_queries
    row_starts = np.cumsum(counts) - counts  # [B]
    query_rows = row_starts[:, None] + inside  # [B, n]
    is_real = np.arange(num_queries)[None, :] < counts[:, None]  # [B, n]
    blocks = [-(-(int(b) + int(c)) // size) for b, c in zip(begins, counts, strict=True)]
    first_slot: int | None = None
    block_ids: torch.Tensor | None = None
    if len(members) == 1:
        table = np.asarray(batch[members[0]].block_table[: blocks[0]], dtype=np.int64)
        if (np.diff(table) == 1).all():
            first_slot = int(table[0]) * size
        else:
            block_ids = _tensor(table, pool.device)
        num_keys = int(begins[0] + counts[0])
    else:
        tables = np.full((len(members), max(blocks)), pool.padding_block, dtype=np.int64)
        for row, (index, count) in enumerate(zip(members, blocks, strict=True)):
            tables[row, :count] = batch[index].block_table[:count]
        block_ids = _tensor(tables.reshape(-1), pool.device)
        num_keys = max(blocks) * size
    return SequenceGroup(
        first_row=first_row,
        num_rows=num_rows,
        num_sequences=len(members),
        num_queries=num_queries,
        num_keys=num_keys,
        first_slot=first_slot,
        block_ids=block_ids,
        query_rows=_tensor(query_rows.reshape(-1), pool.device) if padded else None,
        output_rows=_tensor(np.flatnonzero(is_real.reshape(-1)), pool.device) if padded else None,
        positions=_tensor(begins[:, None] + inside, pool.device),
    )


def _tensor(values: Sequence[int] | NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device, non_blocking=True)
