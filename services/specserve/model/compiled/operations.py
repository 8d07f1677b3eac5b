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

from specserve.model.compiled.assembly import INT8_OFFSET, MAX_ROWS, PANEL
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


def _type_call7(
    typing_context: Any, address: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any
) -> Any:
    """Call compiled code by its address, with seven integers or pointers."""
    return types.void(*[types.int64] * 8), _calling(7)


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


call7: Any = intrinsic(_type_call7)
call8: Any = intrinsic(_type_call8)


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def to_bf16(value: Any) -> Any:
    """Round a float32 to the nearest bfloat16, ties to even; a NaN stays one."""
    # A NaN's bits could round up to those of zero.
    return u16(0x7FC0) if math.isnan(value) else number_to_bf16(value)


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def number_to_bf16(value: Any) -> Any:
    """Round a float32 that is no NaN."""
    bits = f32(value).view(u32)
    return u16(u32(bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """Exponential to float32 accuracy (Cephes' polynomial), in a form that vectorises."""
    x = min(max(x, f32(-87.0)), f32(88.0))
    n = np.floor(x * f32(1.44269504) + f32(0.5))  # math.floor would make it 64 bits wide
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
        call8(kernels[count], weights[0], x, y, inputs // 2, stride, panels, 0, weights[1])
        return
    parts = -(-count // MAX_ROWS)
    # A panel stays in the cache while all rows pass by; their products hide fetching the next.
    for panel in range(panels):
        for part in range(parts):
            begin, end = count * part // parts, count * (part + 1) // parts
            call8(
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
def score_ids(rows: Any, weights: Any, ids: Any, out: Any) -> None:
    """Multiply [R, H] bfloat16 rows by some rows of a [V, H] bfloat16 matrix, to [R, E] float32."""
    for e in range(len(ids)):
        weight = weights[ids[e]]
        for r in range(len(rows)):
            row, total = rows[r], f32(0)
            for i in range(len(weight)):
                total += u32(u32(row[i]) << u32(16)).view(f32) * u32(
                    u32(weight[i]) << u32(16)
                ).view(f32)
            out[r, e] = total


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
            out[t, i] = to_bf16(hidden[t, i] * factor * weight[i])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def gate(joined: Any, out: Any) -> None:
    """Return silu(gate) * up of [T, at least 2 I] float32 rows as [T, I] bfloat16."""
    count, size = out.shape
    for t in range(count):
        for i in range(size):
            a = joined[t, i]
            out[t, i] = to_bf16(a / (f32(1) + exp(-a)) * joined[t, size + i])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def add(hidden: Any, rows: Any, bias: Any) -> None:
    """Add [T, at least H] rows, and a bias unless it is empty, to the residual [T, H]."""
    count, size = hidden.shape
    for t in range(count):
        for i in range(size):
            hidden[t, i] += rows[t, i]
        for i in range(len(bias)):
            hidden[t, i] += bias[i]
