"""A decoder layer's arithmetic around the inner loops, compiled by numba.

bfloat16 travels as uint16. Residuals, norms and sums are float32; what enters a product is rounded
to bfloat16, and keys and values are kept so. Every row is computed by itself, in one order. Knows
arrays; knows no model and no session.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from specserve.model.compiled.assembly import INT8_OFFSET, MAX_HEADS, MAX_ROWS, PANEL
from specserve.model.compiled.code_cache import can_keep_code, stamp_whole_folder

f32, i32, u16, u32, i64 = np.float32, np.int32, np.uint16, np.uint32, np.int64


stamp_whole_folder()

# No "nnan" or "ninf": a row that went bad has to be seen.
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp", "afn"},
    "nogil": True,
    "error_model": "numpy",
    "cache": can_keep_code(),
}
"""How every function here is compiled."""


def _type_call5(typing_context: Any, address: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Call compiled code by its address, with five integers or pointers."""
    return types.void(*[types.int64] * 6), _calling(5)


def _type_call8(
    typing_context: Any,
    address: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    e: Any,
    f: Any,
    g: Any,
    h: Any,
) -> Any:
    """Call compiled code by its address, with eight integers or pointers."""
    return types.void(*[types.int64] * 9), _calling(8)


def _calling(count: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), list(arguments[1:]))
        return context.get_dummy_value()

    return generate


_call5: Any = intrinsic(_type_call5)
_call8: Any = intrinsic(_type_call8)


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def _to_bf16(value: Any) -> Any:
    """Round a float32 to the nearest bfloat16, ties to even; a NaN stays one."""
    bits = f32(value).view(u32)
    # A NaN's bits could round up to those of zero.
    rounded = u32(bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    return u16(0x7FC0) if math.isnan(value) else u16(rounded)


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """Exponential to float32 accuracy (Cephes' polynomial), in a form that vectorises."""
    x = min(max(x, f32(-87.0)), f32(88.0))
    n = f32(math.floor(x * f32(1.44269504) + f32(0.5)))
    r = x - n * f32(0.693359375) + n * f32(2.12194440e-4)
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    p = p * r * r + r + f32(1.0)
    return p * i32((i32(n) + i32(127)) << i32(23)).view(f32)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _begin_int8(rows: Any, out: Any) -> None:
    """Begin [T, whole panels] sums with what takes the int8 loops' offset out of them."""
    for t in range(rows.shape[0]):
        total = f32(0)
        for i in range(rows.shape[1]):
            total += u32(u32(rows[t, i]) << u32(16)).view(f32)
        out[t, :] = -f32(INT8_OFFSET) * total


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def matmul(kernels: Any, weights: Any, element_bytes: Any, rows: Any, out: Any) -> None:
    """Multiply [T, K] bfloat16 rows by packed panels into [T, whole panels] float32.

    Args:
        kernels: addresses by the number of rows.
        weights: addresses of the panels and of their scales.
        element_bytes: bytes of a weight.
    """
    count, inputs = rows.shape
    stride = out.shape[1]
    if element_bytes == 1:
        _begin_int8(rows, out)
    panels = stride // PANEL
    x, y = rows.ctypes.data, out.ctypes.data
    panel_bytes = PANEL * inputs * element_bytes
    if count <= MAX_ROWS:
        # Read straight on, the processor fetches ahead by itself; asking it to would cost a third.
        _call8(kernels[count], weights[0], x, y, inputs // 2, stride, panels, 0, weights[1])
        return
    parts = -(-count // MAX_ROWS)
    # A panel stays in the cache while all rows pass by; their products hide fetching the next.
    for panel in range(panels):
        for part in range(parts):
            begin, end = count * part // parts, count * (part + 1) // parts
            _call8(
                kernels[end - begin],
                weights[0] + panel * panel_bytes,
                x + begin * inputs * 2,
                y + (begin * stride + panel * PANEL) * 4,
                inputs // 2,
                stride,
                1,
                panel_bytes,
                weights[1] + panel * PANEL * 4,
            )


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def normalise(hidden: Any, weight: Any, eps: Any, out: Any) -> None:
    """Divide [T, H] float32 rows by their root mean square and scale them, to bfloat16."""
    count, size = hidden.shape
    for t in range(count):
        total = f32(0)
        for i in range(size):
            total += hidden[t, i] * hidden[t, i]
        factor = f32(1) / f32(math.sqrt(total / f32(size) + eps))
        for i in range(size):
            out[t, i] = _to_bf16(hidden[t, i] * factor * weight[i])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def turn_and_store(
    joined: Any, bias: Any, cos: Any, sin: Any, slots: Any, query: Any, keys: Any, values: Any
) -> None:
    """Add the bias, turn queries and keys by their position, store keys and values.

    Args:
        joined: [T, at least (Hq + 2 Hkv) D] float32: queries, keys, values.
        bias: [(Hq + 2 Hkv) D] float32, or empty.
        cos, sin: [T, D / 2].
        slots: [T] where each token's keys and values go.
        query: [T, Hq D] bfloat16, written.
        keys, values: [Hkv, S, D] bfloat16 pool of the layer.
    """
    num_kv_heads, _, dim = keys.shape
    num_heads = query.shape[1] // dim
    half = dim // 2
    for t in range(joined.shape[0]):
        slot = slots[t]
        for i in range(len(bias)):
            joined[t, i] += bias[i]
        for h in range(num_heads):
            at = h * dim
            for d in range(half):
                a, b = joined[t, at + d], joined[t, at + half + d]
                query[t, at + d] = _to_bf16(a * cos[t, d] - b * sin[t, d])
                query[t, at + half + d] = _to_bf16(b * cos[t, d] + a * sin[t, d])
        for h in range(num_kv_heads):
            at = (num_heads + h) * dim
            for d in range(half):
                a, b = joined[t, at + d], joined[t, at + half + d]
                keys[h, slot, d] = _to_bf16(a * cos[t, d] - b * sin[t, d])
                keys[h, slot, half + d] = _to_bf16(b * cos[t, d] + a * sin[t, d])
            at = (num_heads + num_kv_heads + h) * dim
            for d in range(dim):
                values[h, slot, d] = _to_bf16(joined[t, at + d])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def attend(
    score_kernels: Any,
    mix_kernels: Any,
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    sequences: Any,
    positions: Any,
    block_size: Any,
    window: Any,
    scale: Any,
    scores: Any,
    sums: Any,
    out: Any,
) -> None:
    """Attend from each row to its own sequence's slots up to its own position.

    Args:
        query: [T, Hq D] bfloat16; heads of one key head lie side by side.
        keys, values: [Hkv, S, D] bfloat16.
        tables: [sequences, blocks] block ids.
        sequences, positions: [T] each row's sequence, and its position there.
        window: most recent positions seen, the row's own included.
        scores: [MAX_HEADS, at least the longest position + 1] float32 scratch.
        sums: [MAX_HEADS, D] float32 scratch.
        out: [T, Hq D] bfloat16, written.
    """
    num_kv_heads, num_slots, dim = keys.shape
    per_key = query.shape[1] // (dim * num_kv_heads)
    room = scores.shape[1]
    q, p, s = query.ctypes.data, scores.ctypes.data, sums.ctypes.data
    k, v = keys.ctypes.data, values.ctypes.data
    for t in range(query.shape[0]):
        end = positions[t] + 1
        begin = max(i64(0), end - window)
        table = tables[sequences[t]]
        for h in range(num_kv_heads):
            for first in range(0, per_key, MAX_HEADS):
                heads = min(MAX_HEADS, per_key - first)
                column = (h * per_key + first) * dim
                at = begin
                while at < end:
                    count = min(end, (at // block_size + 1) * block_size) - at
                    slot = table[at // block_size] * block_size + at % block_size
                    _call5(
                        score_kernels[heads],
                        q + (t * query.shape[1] + column) * 2,
                        k + (h * num_slots + slot) * dim * 2,
                        p + at * 4,
                        room,
                        count,
                    )
                    at += count
                for j in range(heads):
                    _softmax(scores[j, begin:end], scale)
                    sums[j, :] = f32(0)
                at = begin
                while at < end:
                    count = min(end, (at // block_size + 1) * block_size) - at
                    slot = table[at // block_size] * block_size + at % block_size
                    _call5(
                        mix_kernels[heads],
                        p + at * 4,
                        room,
                        v + (h * num_slots + slot) * dim * 2,
                        count,
                        s,
                    )
                    at += count
                for j in range(heads):
                    for d in range(dim):
                        out[t, column + j * dim + d] = _to_bf16(sums[j, d])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _softmax(scores: Any, scale: Any) -> None:
    """Turn scores into weights that sum to one, in place; one bad score spoils them all."""
    top = f32(-np.inf)
    spoiled = f32(0)
    for i in range(len(scores)):
        score = scores[i]
        top = score if score > top else top
        spoiled += score - score
    total = f32(0)
    for i in range(len(scores)):
        weight = _exp((scores[i] - top) * scale)
        scores[i] = weight
        total += weight
    factor = f32(1) / (total + spoiled)
    for i in range(len(scores)):
        scores[i] *= factor


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def gate(joined: Any, out: Any) -> None:
    """Return silu(gate) * up of [T, at least 2 I] float32 rows as [T, I] bfloat16."""
    count, size = out.shape
    for t in range(count):
        for i in range(size):
            a = joined[t, i]
            out[t, i] = _to_bf16(a / (f32(1) + _exp(-a)) * joined[t, size + i])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def add(hidden: Any, rows: Any, bias: Any) -> None:
    """Add [T, at least H] rows, and a bias unless it is empty, to the residual [T, H]."""
    count, size = hidden.shape
    for t in range(count):
        for i in range(size):
            hidden[t, i] += rows[t, i]
        for i in range(len(bias)):
            hidden[t, i] += bias[i]
