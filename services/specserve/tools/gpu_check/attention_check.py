"""The device's attention in bfloat16 against a softmax written out in float32.

The very calls of `model/attention.py`, for which a device chooses kernels by shape and stride: keys
as views of a pool and gathered, query heads on one key head by a stride of zero, masks of any
length. Knows plans and pools; knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from specserve.model.attention import PagedBatch
from specserve.model.kv_pool import KvPool, LayerShape
from specserve.model.loading import prepare_device
from specserve.model.paged_batch import plan_batch
from specserve.model.runner import SequenceSlice

LARGEST_ERROR = 0.02
"""Of a row: norm of the difference over the norm. Roundings of bfloat16 make 0.003; one key too
many or too few makes 0.05, and a wrong one more."""

HEAD_DIMS = (64, 128)
NUM_NEW = (1, 8, 17, 40, 64)
"""New tokens of a sequence that runs alone: up to 16 share a padded call, more have one without."""
NUM_KEYS = (160, 161, 162)
"""0, 1 and 2 beyond a multiple of 32: kernels want masks aligned, and copy others."""
TOGETHER = (
    ((158, 1), (130, 1), (97, 1)),
    ((150, 5), (131, 5), (90, 3)),
    ((16, 33), (160, 1), (110, 9)),
)
"""(cached, new) tokens of sequences of one batch: decoding, verifying, and with a prefill."""

_NUM_KV_HEADS, _PER_KEY = 2, 4
_BLOCK_SIZE, _NUM_BLOCKS = 16, 40


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """What the comparison showed."""

    num_batches: int
    largest_error: float
    """See LARGEST_ERROR."""
    worst: str
    """The batch that it arose in."""

    @property
    def passed(self) -> bool:
        """Whether the device computes what was asked."""
        return self.largest_error <= LARGEST_ERROR


def compare_attention(device: torch.device) -> AttentionReport:
    """Run every kind of batch on the device, and compare each row."""
    prepare_device(device)
    pools = {dim: _used_pool(dim, device) for dim in HEAD_DIMS}
    alone = [((keys - new, new),) for new, keys in product(NUM_NEW, NUM_KEYS)]
    batches = list(product(HEAD_DIMS, (False, True), [*alone, *TOGETHER]))
    errors = np.array(
        [_error(pools[dim], is_scattered, lengths) for dim, is_scattered, lengths in batches]
    )
    dim, is_scattered, lengths = batches[int(errors.argmax())]  # NaN wins
    blocks = "scattered" if is_scattered else "consecutive"
    worst = f"heads of {dim}, {blocks} blocks, (cached, new) {lengths}"
    return AttentionReport(len(batches), float(errors.max()), worst)


class _Sequence:
    """One sequence of random numbers, in bfloat16 on the CPU, and where it lies in the pool."""

    def __init__(
        self, cached: int, new: int, dim: int, table: Sequence[int], generator: torch.Generator
    ) -> None:
        def numbers(num_heads: int, num_tokens: int) -> torch.Tensor:
            return torch.randn(num_heads, num_tokens, dim, generator=generator).bfloat16()

        self.cached, self.new, self.table = cached, new, table
        self.query = numbers(_NUM_KV_HEADS * _PER_KEY, new)  # [Hq, n, D]
        self.keys = numbers(_NUM_KV_HEADS, cached + new)  # [Hkv, L, D]
        self.values = numbers(_NUM_KV_HEADS, cached + new)

    def slots(self) -> torch.Tensor:
        """Return the pool's slot of each token, [L]."""
        tokens = torch.arange(self.cached + self.new)
        return torch.tensor(self.table)[tokens // _BLOCK_SIZE] * _BLOCK_SIZE + tokens % _BLOCK_SIZE

    def wanted(self) -> torch.Tensor:
        """Attend from each new token in float32; [n, Hq, D]."""
        keys, values = (
            part.float().repeat_interleave(_PER_KEY, 0) for part in (self.keys, self.values)
        )
        scores = self.query.float() @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5  # [Hq, n, L]
        positions = torch.arange(self.cached, self.cached + self.new)[:, None]
        hidden = torch.arange(scores.shape[-1]) > positions  # [n, L]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output: torch.Tensor = weights @ values
        return output.transpose(0, 1)


def _used_pool(dim: int, device: torch.device) -> KvPool:
    """Make a pool full of what others left behind, which nobody must see."""
    shape = LayerShape(_NUM_KV_HEADS, dim, dim)
    pool = KvPool([shape], _NUM_BLOCKS, _BLOCK_SIZE, torch.bfloat16, device)
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(_NUM_KV_HEADS, _NUM_BLOCKS * _BLOCK_SIZE, dim, generator=generator)
    pool.write(0, 0, left.to(device), left.to(device))
    return pool


def _error(pool: KvPool, is_scattered: bool, lengths: Sequence[tuple[int, int]]) -> float:
    """Return the largest error of any row of a batch."""
    device, dim = pool.device, pool.layers[0].key_dim
    generator = torch.Generator().manual_seed(11)
    free = list(range(3, _NUM_BLOCKS))
    if is_scattered:
        random.Random(7).shuffle(free)
    sequences = []
    for cached, new in lengths:
        num_blocks = -(-(cached + new) // _BLOCK_SIZE)
        table, free = free[:num_blocks], free[num_blocks:]
        sequences.append(_Sequence(cached, new, dim, table, generator))
    rows: dict[int, tuple[int, int]] = {}  # {slot: (sequence, new token)}
    for number, sequence in enumerate(sequences):
        slots, cached = sequence.slots(), sequence.cached
        pool.write(
            0,
            slots[:cached].to(device),
            sequence.keys[:, :cached].to(device),
            sequence.values[:, :cached].to(device),
        )
        rows |= {slot: (number, i) for i, slot in enumerate(slots[cached:].tolist())}
    plan = plan_batch([SequenceSlice([0] * s.new, s.cached, s.table, 0) for s in sequences], pool)
    # The plan orders sequences as it likes: rows are known by their slots.
    order = [rows[slot] for slot in plan.slots.tolist()]
    query, keys, values = (
        torch.stack([parts[s][:, i] for s, i in order], dim=1)[None].to(device)  # [1, H, T, D]
        for parts in (
            [s.query for s in sequences],
            [s.keys[:, s.cached :] for s in sequences],
            [s.values[:, s.cached :] for s in sequences],
        )
    )
    answer = PagedBatch(plan, pool).attend(0, query, keys, values, dim**-0.5, None)[0]  # [T, Hq, D]
    expected = [sequence.wanted() for sequence in sequences]
    wanted = torch.stack([expected[s][i] for s, i in order])
    difference = (answer.cpu().float() - wanted).flatten(1).norm(dim=1)
    return float((difference / wanted.flatten(1).norm(dim=1)).max())
