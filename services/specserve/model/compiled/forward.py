"""One forward of a whole decoder, compiled by numba: a batch's token ids in, logits out.

One call: between its parts nothing is left to Python, whose small operations would cost as much as
a layer. Knows arrays; knows no model and no session.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from specserve.model.compiled.attention import attend, lay_out, turn_and_store
from specserve.model.compiled.operations import (
    OPTIONS,
    add,
    f32,
    gate,
    matmul,
    normalise,
    score_ids,
    u32,
)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _spread(
    starts: Any,
    counts: Any,
    tables: Any,
    block_size: Any,
    positions: Any,
    sequences: Any,
    slots: Any,
) -> None:
    """Write each row's position, sequence and slot, [T]."""
    t = 0
    for s in range(len(counts)):
        for i in range(counts[s]):
            position = starts[s] + i
            positions[t] = position
            sequences[t] = s
            slots[t] = tables[s, position // block_size] * block_size + position % block_size
            t += 1


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _embed(embedding: Any, token_ids: Any, hidden: Any) -> None:
    """Look rows of a [V, H] bfloat16 embedding up, as [T, H] float32."""
    for t in range(len(token_ids)):
        row = embedding[token_ids[t]]
        for i in range(len(row)):
            hidden[t, i] = u32(u32(row[i]) << u32(16)).view(f32)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _take_last(hidden: Any, counts: Any, wanted: Any, out: Any) -> None:
    """Copy each sequence's last rows, as many as are wanted, to [R, H]."""
    end = r = 0
    for s in range(len(counts)):
        end += counts[s]
        for t in range(end - wanted[s], end):
            for i in range(hidden.shape[1]):
                out[r, i] = hidden[t, i]
            r += 1


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def run(
    kernels: Any,
    weights: Any,
    element_bytes: Any,
    norms: Any,
    biases: Any,
    eps: Any,
    embedding: Any,
    batch: Any,
    cos: Any,
    sin: Any,
    block_size: Any,
    windows: Any,
    scale: Any,
    keys: Any,
    values: Any,
    scratch: Any,
    head: Any,
    final_norm: Any,
    logits: Any,
    head_weights: Any,
    context_ids: Any,
    context_logits: Any,
) -> None:
    """Run a batch from token ids to [R, head rows] logits.

    Args:
        head_weights: [V, H] bfloat16, the head before it was cut.
        context_ids: [E] more rows of it; theirs are written to [R, E] context_logits.
    """
    token_ids, starts, counts, wanted, tables = batch
    matmul_kernels, attention_kernels, head_kernels = kernels
    total, size = len(token_ids), embedding.shape[1]
    rows = np.empty((3, total), np.int64)
    positions, sequences, slots = rows[0], rows[1], rows[2]
    _spread(starts, counts, tables, block_size, positions, sequences, slots)
    hidden = np.empty((total, size), np.float32)
    _embed(embedding, token_ids, hidden)
    _run_layers(
        (matmul_kernels, attention_kernels),
        weights,
        element_bytes,
        norms,
        biases,
        eps,
        hidden,
        cos,
        sin,
        slots,
        positions,
        tables,
        sequences,
        block_size,
        windows,
        scale,
        keys,
        values,
        scratch,
    )
    if len(logits):
        last = np.empty((len(logits), size), np.float32)
        _take_last(hidden, counts, wanted, last)
        normed = np.empty((len(logits), size), np.uint16)
        normalise(last, final_norm, eps, normed)
        matmul(head_kernels, head, element_bytes, normed, logits)
        score_ids(normed, head_weights, context_ids, context_logits)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _run_layers(
    kernels: Any,
    weights: Any,
    element_bytes: Any,
    norms: Any,
    biases: Any,
    eps: Any,
    hidden: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    positions: Any,
    tables: Any,
    sequences: Any,
    block_size: Any,
    windows: Any,
    scale: Any,
    keys: Any,
    values: Any,
    scratch: Any,
) -> None:
    """Run all layers over [T, H] hidden rows, in place."""
    matmul_kernels, attention_kernels = kernels
    normed, joined, query, attended, back, wide, inner, attention_scratch = scratch
    joined_bias, output_bias = biases
    places = lay_out(tables, block_size, keys.shape[3])
    for layer in range(weights.shape[0]):
        normalise(hidden, norms[layer, 0], eps, normed)
        matmul(matmul_kernels, weights[layer, 0], element_bytes, normed, joined)
        turn_and_store(
            joined,
            joined_bias[layer],
            cos,
            sin,
            positions,
            slots,
            block_size,
            query,
            keys[layer],
            values[layer],
        )
        attend(
            attention_kernels,
            query,
            keys[layer],
            values[layer],
            places,
            sequences,
            positions,
            block_size,
            windows[layer],
            scale,
            attention_scratch,
            attended,
        )
        matmul(matmul_kernels, weights[layer, 1], element_bytes, attended, back)
        add(hidden, back, output_bias[layer])
        normalise(hidden, norms[layer, 1], eps, normed)
        matmul(matmul_kernels, weights[layer, 2], element_bytes, normed, wide)
        gate(wide, inner)
        matmul(matmul_kernels, weights[layer, 3], element_bytes, inner, back)
        add(hidden, back, output_bias[layer, :0])
