"""The inner loops of a decoder's matrix products, as LLVM assembly for AVX512-BF16.

A processor multiplies pairs of bfloat16 and adds them up in float32 (`dpbf16ps`: 32 products an
instruction). What limits few rows is reading the weights once, so the loops are laid out for that.
Every result is added up in one order, whatever runs beside it: a row's bits never depend on the
batch. Knows registers; knows no model.
"""

from __future__ import annotations

LANES = 16
"""float32 lanes of a register."""

PANEL_REGISTERS = 4
PANEL = LANES * PANEL_REGISTERS
"""Outputs of one weight panel."""

MAX_ROWS = 6
"""Rows multiplied at once: 6 x 4 sums, 4 weights and a broadcast fill 29 of 32 registers."""

INT8_ZERO = 64
"""The byte that stands for weight 0: 1 ... 127 are -63 ... 63."""

INT8_OFFSET = 128 + INT8_ZERO
"""What the int8 loops add to every weight; the caller takes it out of the sums."""

DOT = "@llvm.x86.avx512bf16.dpbf16ps.512"
"""What multiplies pairs: its sums, and two registers of pairs."""

_DECLARATIONS = f"""
declare <16 x float> {DOT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""


def matmul_text() -> str:
    """Return the declarations and `matmul_R`, `matmul8_R` and `stream_R` of all R."""
    parts = [_DECLARATIONS]
    for rows in range(1, MAX_ROWS + 1):
        parts += [
            _matmul(f"matmul_{rows}", rows),
            _matmul(f"matmul8_{rows}", rows, is_int8=True),
            _matmul(f"stream_{rows}", rows, is_read_once=True),
        ]
    return "\n".join(parts)


def _matmul(name: str, rows: int, *, is_int8: bool = False, is_read_once: bool = False) -> str:
    """Multiply `rows` rows by `%panels` weight panels.

    %weights: panels of [K / 2][4][16][2] bfloat16, or bytes laid out by `kernels.PanelStore`;
    %x: [rows, K] bfloat16, a pair read as one i32; %y: [rows, %stride] float32; %pairs: K / 2;
    %ahead: bytes from a weight to the one that is fetched into the cache with it; %scales: what an
    int8 output's sum is multiplied by, one float32 an output; with int8, %y holds what its sums
    begin with.

    Args:
        is_read_once: the weights pass through the caches without staying there, so that what else
            runs on the machine (a draft, the servers) finds its own things again.
    """
    locality = 0 if is_read_once else 2
    registers = [(r, v) for r in range(rows) for v in range(PANEL_REGISTERS)]
    element = 1 if is_int8 else 2
    out = [
        f"define void @{name}(ptr %weights, ptr %x, ptr %y, i64 %pairs,",
        " i64 %stride, i64 %panels, i64 %ahead, ptr %scales) {",
        "entry:\n br label %panel",
        "panel:\n %n = phi i64 [0, %entry], [%next_n, %store]",
        f" %w0 = mul i64 %n, %pairs\n %w1 = mul i64 %w0, {2 * element * PANEL}",
        " %w = getelementptr i8, ptr %weights, i64 %w1",
        f" %y0 = mul i64 %n, {4 * PANEL}\n %out = getelementptr i8, ptr %y, i64 %y0",
        " %factors = getelementptr i8, ptr %scales, i64 %y0",
        *(f" %s{r} = mul i64 %stride, {r}" for r in range(rows)),
        *(
            f" %s{r}.{v} = add i64 %s{r}, {LANES * v}\n"
            f" %q{r}.{v} = getelementptr float, ptr %out, i64 %s{r}.{v}"
            for r, v in registers
        ),
        *(
            f" %o{r}.{v} = load <16 x float>, ptr %q{r}.{v}, align 4"
            for r, v in registers
            if is_int8
        ),
        " br label %loop",
        "loop:\n %i = phi i64 [0, %panel], [%next_i, %loop]",
    ]
    out += [
        f" %a{r}.{v} = phi <16 x float> [{first}, %panel], [%b{r}.{v}, %loop]"
        for r, v in registers
        for first in (f"%o{r}.{v}" if is_int8 else "zeroinitializer",)
    ]
    out.append(f" %i0 = mul i64 %i, {PANEL_REGISTERS}")
    for v in range(0, PANEL_REGISTERS, 2 if is_int8 else 1):
        out += [
            f" %i{v}.w = add i64 %i0, {v}",
            f" %p{v} = getelementptr <32 x i{8 * element}>, ptr %w, i64 %i{v}.w",
            f" %p{v}.n = getelementptr i8, ptr %p{v}, i64 %ahead",
            f" call void @llvm.prefetch.p0(ptr %p{v}.n, i32 0, i32 {locality}, i32 1)",
            *(_widen(v) if is_int8 else [f" %w{v}.v = load <32 x bfloat>, ptr %p{v}, align 64"]),
        ]
    for r in range(rows):
        out += [
            f" %x{r}.0 = mul i64 %pairs, {r}\n %x{r}.1 = add i64 %x{r}.0, %i",
            *load_pair(f"%x{r}", "%x", f"%x{r}.1"),
        ]
        out += [
            f" %b{r}.{v} = call <16 x float> {DOT}(<16 x float> %a{r}.{v}, "
            f"<32 x bfloat> %w{v}.v, <32 x bfloat> %x{r})"
            for v in range(PANEL_REGISTERS)
        ]
    out += [
        " %next_i = add i64 %i, 1\n %more = icmp slt i64 %next_i, %pairs",
        " br i1 %more, label %loop, label %store",
        "store:",
    ]
    if is_int8:
        for v in range(PANEL_REGISTERS):
            out += [
                f" %f{v}.p = getelementptr <16 x float>, ptr %factors, i64 {v}",
                f" %f{v} = load <16 x float>, ptr %f{v}.p, align 4",
            ]
            out += [f" %c{r}.{v} = fmul <16 x float> %b{r}.{v}, %f{v}" for r in range(rows)]
    for r, v in registers:
        total = f"%{'c' if is_int8 else 'b'}{r}.{v}"
        out.append(f" store <16 x float> {total}, ptr %q{r}.{v}, align 4")
    out += [
        " %next_n = add i64 %n, 1\n %another = icmp slt i64 %next_n, %panels",
        " br i1 %another, label %panel, label %done",
        "done:\n ret void\n}",
    ]
    return "\n".join(out)


def _widen(v: int) -> list[str]:
    """Load 64 bytes as two registers of bfloat16.

    A byte b below 128 under the byte 0x43 is the bfloat16 128 + b, exactly: one instruction that
    interleaves bytes makes 32 weights, where converting integers takes seven.
    """
    out = [f" %w{v}.b = load <64 x i8>, ptr %p{v}, align 64"]
    for register, first in ((v, 0), (v + 1, 8)):
        # Within each 16 bytes the first eight are one register's, the others the next one's.
        places = [16 * lane + first + byte for lane in range(4) for byte in range(8)]
        mask = ", ".join(f"i32 {place}, i32 {64 + place}" for place in places)
        out += [
            f" %w{register}.u = shufflevector <64 x i8> %w{v}.b, <64 x i8> splat (i8 67),",
            f" <64 x i32> <{mask}>",
            f" %w{register}.v = bitcast <64 x i8> %w{register}.u to <32 x bfloat>",
        ]
    return out


def load_pair(name: str, base: str, index: str) -> list[str]:
    """Load the pair of bfloat16 with that index into all lanes of `name`."""
    return [
        f" {name}.p = getelementptr i32, ptr {base}, i64 {index}",
        f" {name}.s = load i32, ptr {name}.p, align 4",
        f" {name}.e = insertelement <16 x i32> poison, i32 {name}.s, i32 0",
        f" {name}.b = shufflevector <16 x i32> {name}.e, <16 x i32> poison,",
        " <16 x i32> zeroinitializer",
        f" {name} = bitcast <16 x i32> {name}.b to <32 x bfloat>",
    ]
