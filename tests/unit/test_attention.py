"""The paged attention against a softmax written out."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from specserve.errors import ConfigurationError
from specserve.model.attention import PagedBatch, ShapeProbe, paged_attention_forward
from specserve.model.kv_pool import KvPool, LayerShape
from specserve.model.paged_batch import plan_batch
from specserve.model.runner import SequenceSlice

SHAPE = LayerShape(num_kv_heads=2, key_dim=8, value_dim=8)
BLOCK = 4
SCALE = 0.3


class Sequence:
    """Random queries, keys and values of one sequence, and what attention must answer."""

    def __init__(self, length: int, shape: LayerShape, per_key: int, window: int | None) -> None:
        heads = shape.num_kv_heads * per_key
        self.query = torch.randn(heads, length, shape.key_dim)
        self.key = torch.randn(shape.num_kv_heads, length, shape.key_dim)
        self.value = torch.randn(shape.num_kv_heads, length, shape.value_dim)
        keys = self.key.repeat_interleave(per_key, 0)
        values = self.value.repeat_interleave(per_key, 0)
        scores = self.query @ keys.transpose(1, 2) * SCALE  # [Hq, n, n]
        rows, columns = torch.arange(length)[:, None], torch.arange(length)[None, :]
        hidden = columns > rows
        if window is not None:
            hidden |= columns <= rows - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        self.wanted = (weights @ values).transpose(0, 1)  # [n, Hq, Dv]


def run(
    sequences: list[Sequence],
    cuts: list[list[int]],
    shape: LayerShape,
    scattered: bool,
    window: int | None,
) -> float:
    """Feed each sequence in the pieces that its cuts name; return the largest error."""
    pool = KvPool([shape], 64, BLOCK, torch.float32, torch.device("cpu"))
    free = list(range(64))
    if scattered:
        random.Random(3).shuffle(free)
    tables = []
    for sequence in sequences:
        count = -(-sequence.query.shape[1] // BLOCK)
        tables.append(tuple(free[:count]))
        free = free[count:]
    worst = 0.0
    for piece in range(max(len(c) for c in cuts) - 1):
        members = [i for i, c in enumerate(cuts) if piece + 1 < len(c)]
        spans = {i: range(cuts[i][piece], cuts[i][piece + 1]) for i in members}
        batch = [SequenceSlice([0] * len(spans[i]), spans[i].start, tables[i], 0) for i in members]
        plan = plan_batch(batch, pool)
        # The plan may order sequences as it likes: rows are found by their slots.
        owner = {
            tables[i][t // BLOCK] * BLOCK + t % BLOCK: (i, t) for i in members for t in spans[i]
        }
        order = [owner[slot] for slot in plan.slots.tolist()]
        assert plan.positions.tolist() == [t for _, t in order]
        query, key, value = (
            torch.stack([getattr(sequences[i], name)[:, t] for i, t in order], 1).unsqueeze(0)
            for name in ("query", "key", "value")
        )
        answer = PagedBatch(plan, pool).attend(0, query, key, value, SCALE, window)[0]
        wanted = torch.stack([sequences[i].wanted[t] for i, t in order])
        worst = max(worst, float((answer - wanted).abs().max()))
    return worst


@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("per_key", [1, 3])
@pytest.mark.parametrize(
    "cuts",
    [
        [[0, 1]],
        [[0, 30]],
        [[0, 17, 18, 23]],
        [[0, 5, 6], [0, 1, 6], [0, 12, 13]],
        [[0, 40, 41, 46], [0, 2, 3, 8], [0, 3, 23, 24], [0, 1, 2, 3]],
    ],
)
def test_every_piece_sees_exactly_its_own_past(cuts, per_key, window, scattered):
    """Ragged batches, any block order: each row is the softmax over its own sequence so far."""
    torch.manual_seed(5)
    sequences = [Sequence(c[-1], SHAPE, per_key, window) for c in cuts]
    assert run(sequences, cuts, SHAPE, scattered, window) < 1e-5


def test_values_may_be_of_another_size_than_keys():
    torch.manual_seed(5)
    shape = LayerShape(num_kv_heads=2, key_dim=8, value_dim=4)
    cuts = [[0, 20, 21, 24], [0, 3, 4]]
    sequences = [Sequence(c[-1], shape, 2, None) for c in cuts]
    assert run(sequences, cuts, shape, True, None) < 1e-5


def test_B007_positions_and_slots_continue_from_the_cached_length():
    """position_ids are range(start, start + n) for every sequence, and slots follow the table."""
    pool = KvPool([SHAPE], 16, BLOCK, torch.float32, torch.device("cpu"))
    batch = [
        SequenceSlice([7, 8, 9], 6, (3, 9, 1), 2),
        SequenceSlice([5], 0, (12,), 1),
        SequenceSlice([1, 2], 15, (0, 2, 4, 6, 8), 1),
    ]
    plan = plan_batch(batch, pool)
    rows = list(
        zip(plan.token_ids.tolist(), plan.positions.tolist(), plan.slots.tolist(), strict=True)
    )
    assert sorted(rows) == [(1, 15, 27), (2, 16, 32), (5, 0, 48), (7, 6, 38), (8, 7, 39), (9, 8, 4)]
    assert [plan.token_ids[r].item() for r in plan.logit_rows] == [8, 9, 5, 2]


def test_sequences_of_very_different_lengths_are_not_padded_to_each_other():
    """Padding at most about doubles what is gathered, whatever the mixture."""
    pool = KvPool([SHAPE], 600, BLOCK, torch.float32, torch.device("cpu"))
    lengths = [1, 3, 9, 30, 100, 301]
    table = tuple(range(600))
    batch = [SequenceSlice([0], n - 1, table, 1) for n in lengths]
    groups = plan_batch(batch, pool).groups
    assert sum(g.num_sequences for g in groups) == len(lengths)
    gathered = sum(g.num_sequences * g.num_keys for g in groups)
    assert gathered <= 2 * sum(n + 2 * BLOCK for n in lengths)
    assert all(a.first_row < b.first_row for a, b in pairwise(groups))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_is_not_computed_is_refused(name):
    module = torch.nn.Module()
    module.layer_idx = 0
    query = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ConfigurationError, match=name):
        paged_attention_forward(
            module, query, query, query, None, paged_batch=ShapeProbe(), **{name: torch.ones(1)}
        )


def test_attention_without_a_batch_or_of_an_encoder_is_refused():
    module = torch.nn.Module()
    module.layer_idx = 0
    query = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ConfigurationError, match="paged batch"):
        paged_attention_forward(module, query, query, query, None)
    module.is_causal = False
    with pytest.raises(ConfigurationError, match="not causal"):
        paged_attention_forward(module, query, query, query, None, paged_batch=ShapeProbe())
