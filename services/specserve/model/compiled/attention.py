"""Attention over a paged cache, compiled by numba: turn, store, score, weigh, mix.

Within its block of B token slots a key head's pair of elements lies as [D / 2, B, 2], a value
head's pair of positions as [B / 2, D, 2]: what the inner loops read whole. Rows of one sequence
that lie side by side share what is read; each row's sums are added up in one order, whatever rows
came with it. Knows arrays; knows no model and no session.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from specserve.model.compiled.assembly import LANES, MAX_ROWS
from specserve.model.compiled.attention_assembly import MAX_HEADS
from specserve.model.compiled.operations import (
    OPTIONS,
    call7,
    call8,
    exp,
    f32,
    i32,
    i64,
    number_to_bf16,
    to_bf16,
    u16,
    u32,
)

_PAIRS_AT_ONCE = 64
"""Pairs of positions mixed for all vectors in turn: their values stay in the first cache."""


INFINITY = 0x7F800000
"""Bits of float32's infinity: those of a number are smaller, without its sign."""


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def lay_out(tables: Any, block_size: Any, dim: Any) -> Any:
    """Say where the sequences' chunks of keys and pairs of values lie.

    Args:
        tables: [sequences, blocks] block ids.
        block_size: token slots of a block, even.
        dim: elements of a head.

    Returns:
        chunks: [sequences, C, 2] each chunk's first position, and its bytes from a head's keys.
        pairs: [sequences, P] each pair's bytes from a head's values.
    """
    count, blocks = tables.shape
    a_block = -(-block_size // LANES)
    half = block_size // 2
    chunks = np.empty((count, blocks * a_block, 2), np.int64)
    pairs = np.empty((count, blocks * half), np.int64)
    for s in range(count):
        for b in range(blocks):
            start = tables[s, b] * block_size * dim * 2
            for c in range(a_block):
                chunks[s, b * a_block + c, 0] = b * block_size + c * LANES
                chunks[s, b * a_block + c, 1] = start + c * LANES * 4
            for p in range(half):
                pairs[s, b * half + p] = start + p * dim * 4
    return chunks, pairs


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def turn_and_store(
    joined: Any,
    bias: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    slots: Any,
    block_size: Any,
    query: Any,
    keys: Any,
    values: Any,
) -> None:
    """Add the bias, turn queries and keys by their position, store keys and values.

    Args:
        joined: [T, at least (Hq + 2 Hkv) D] float32: queries, keys, values.
        bias: [(Hq + 2 Hkv) D] float32, or empty.
        cos, sin: [positions, D / 2].
        positions: [T] each row's position in its sequence.
        slots: [T] where each token's keys and values go.
        query: [T, Hq D] bfloat16, written.
        keys, values: [Hkv, S, D] bfloat16 pool of the layer.
    """
    num_kv_heads, _, dim = keys.shape
    num_heads = query.shape[1] // dim
    half = dim // 2
    flat_keys, flat_values = keys.reshape(num_kv_heads, -1), values.reshape(num_kv_heads, -1)
    turned = np.empty(dim, np.uint16)
    for t in range(joined.shape[0]):
        for i in range(len(bias)):
            joined[t, i] += bias[i]
        at_position = positions[t]
        within = slots[t] % block_size
        start = (slots[t] - within) * dim
        for h in range(num_heads + num_kv_heads):
            at = h * dim
            for d in range(half):
                a, b = joined[t, at + d], joined[t, at + half + d]
                turned[d] = to_bf16(a * cos[at_position, d] - b * sin[at_position, d])
                turned[half + d] = to_bf16(b * cos[at_position, d] + a * sin[at_position, d])
            if h < num_heads:
                for d in range(dim):
                    query[t, at + d] = turned[d]
            else:
                for d in range(half):
                    place = start + 2 * (d * block_size + within)
                    flat_keys[h - num_heads, place] = turned[2 * d]
                    flat_keys[h - num_heads, place + 1] = turned[2 * d + 1]
        for h in range(num_kv_heads):
            at = (num_heads + num_kv_heads + h) * dim
            place = start + (within // 2) * 2 * dim + within % 2
            for d in range(dim):
                flat_values[h, place + 2 * d] = to_bf16(joined[t, at + d])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def attend(
    kernels: Any,
    query: Any,
    keys: Any,
    values: Any,
    places: Any,
    sequences: Any,
    positions: Any,
    block_size: Any,
    window: Any,
    scale: Any,
    scratch: Any,
    out: Any,
) -> None:
    """Attend from each row to its own sequence's slots up to its own position.

    Args:
        kernels: addresses of the loops that score and mix.
        query: [T, Hq D] bfloat16; heads of one key head lie side by side.
        keys, values: [Hkv, S, D] bfloat16.
        places: what `lay_out` returned.
        sequences, positions: [T] each row's sequence, and its position there.
        block_size: token slots of a block.
        window: most recent positions seen, the row's own included.
        scratch: scores [V, room] float32, weights [V, room] bfloat16, sums [V, D] float32 and
            factors [V] float32 of V = MAX_ROWS * MAX_HEADS vectors; room for the longest row and a
            register more.
        out: [T, Hq D] bfloat16, written.
    """
    num_kv_heads, _, dim = keys.shape
    per_key = query.shape[1] // (dim * num_kv_heads)
    t = 0
    while t < query.shape[0]:
        rows = 1
        while rows < MAX_ROWS and t + rows < query.shape[0] and sequences[t + rows] == sequences[t]:
            rows += 1
        for h in range(num_kv_heads):
            for first in range(0, per_key, MAX_HEADS):
                _attend_group(
                    kernels,
                    query,
                    t,
                    rows,
                    (h * per_key + first) * dim,
                    min(MAX_HEADS, per_key - first),
                    keys.ctypes.data + h * keys.strides[0],
                    values.ctypes.data + h * values.strides[0],
                    places,
                    sequences[t],
                    positions[t],
                    block_size,
                    window,
                    scale,
                    scratch,
                    out,
                )
        t += rows


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _attend_group(
    kernels: Any,
    query: Any,
    t: Any,
    rows: Any,
    column: Any,
    heads: Any,
    keys: Any,
    values: Any,
    places: Any,
    sequence: Any,
    position: Any,
    block_size: Any,
    window: Any,
    scale: Any,
    scratch: Any,
    out: Any,
) -> None:
    """Attend from rows t ... t + rows - 1, at `position` and after, in `heads` heads of a key's.

    Args:
        column: of the first head in `query` and `out`.
        keys, values: addresses of the key head's.
    """
    score_kernels, mix_kernels = kernels
    chunks, pairs = places
    scores, weights, sums, factors = scratch
    width, dim = query.shape[1], sums.shape[1]
    begin = max(i64(0), position + 1 - window)
    chunk = _chunk_of(begin, block_size)
    call8(
        score_kernels[rows, heads],
        query.ctypes.data + (t * width + column) * 2,
        width * 2,
        keys,
        chunks.ctypes.data + (sequence * chunks.shape[1] + chunk) * 16,
        _chunk_of(position + rows - 1, block_size) + 1 - chunk,
        block_size * 4,
        scores.ctypes.data,
        scores.shape[1],
    )
    pair = begin // 2
    for v in range(rows * heads):
        own_end = position + 1 + v // heads
        own_begin = max(i64(0), own_end - window)
        # Pairs before a row's window, and both halves of those at the ends, are mixed too.
        for i in range(2 * pair, own_begin):
            weights[v, i] = u16(0)
        weights[v, own_end] = u16(0)
        factors[v] = _weigh(scores[v], weights[v], own_begin, own_end, scale)
        for d in range(dim):
            sums[v, d] = f32(0)
    # All vectors take the pairs that every row sees whole, each row then the few of its own.
    offsets = pairs.ctypes.data + sequence * pairs.shape[1] * 8
    shared = (position + 1) // 2
    while pair < shared:
        count = min(shared - pair, _PAIRS_AT_ONCE)
        _mix(mix_kernels, weights, sums, 0, rows * heads, values, offsets, pair, count, 0)
        pair += count
    for r in range(rows):
        rest, half = (position + 1 + r) // 2 - pair, (position + 1 + r) % 2
        _mix(mix_kernels, weights, sums, r * heads, heads, values, offsets, pair, rest, half)
        for v in range(r * heads, (r + 1) * heads):
            at = column + (v - r * heads) * dim
            for d in range(dim):
                out[t + r, at + d] = to_bf16(sums[v, d] * factors[v])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _chunk_of(position: Any, block_size: Any) -> Any:
    """Return the index of a position's chunk."""
    return position // block_size * -(-block_size // LANES) + position % block_size // LANES


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _mix(
    mix_kernels: Any,
    weights: Any,
    sums: Any,
    first: Any,
    num_vectors: Any,
    values: Any,
    offsets: Any,
    pair: Any,
    count: Any,
    half: Any,
) -> None:
    """Add `count` pairs from `pair` on, and `half` of one more, to the sums of some vectors."""
    room, dim = weights.shape[1], sums.shape[1]
    parts = -(-num_vectors // (len(mix_kernels) - 1))
    for part in range(parts):
        v = first + num_vectors * part // parts
        call7(
            mix_kernels[first + num_vectors * (part + 1) // parts - v],
            weights.ctypes.data + (v * room + 2 * pair) * 2,
            room,
            values,
            offsets + pair * 8,
            count,
            half,
            sums.ctypes.data + v * dim * 4,
        )


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _weigh(scores: Any, weights: Any, begin: Any, end: Any, scale: Any) -> Any:
    """Turn scores begin ... end - 1 into bfloat16 weights; return what makes them sum to one.

    A score that is no number spoils the factor.
    """
    bits = scores.view(np.int32)
    top, most = i32(-(1 << 31)), i32(0)
    # As integers, whose largest is found in any order: a register at a time.
    for i in range(begin, end):
        key = ordered(bits[i])
        size = i32(bits[i] & i32(0x7FFFFFFF))
        top = key if key > top else top
        most = size if size > most else most
    largest = ordered(top).view(f32)
    total = f32(0)
    for i in range(begin, end):
        weight = number_to_bf16(exp((scores[i] - largest) * scale))
        weights[i] = weight
        total += u32(u32(weight) << u32(16)).view(f32)
    return f32(np.nan) if most >= i32(INFINITY) else f32(1) / total


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def ordered(bits: Any) -> Any:
    """Turn a float32's bits into an integer of the same order, or back."""
    return i32(bits ^ ((bits >> i32(31)) & i32(0x7FFFFFFF)))
