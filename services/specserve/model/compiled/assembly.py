"""The three inner loops of a decoder's forward, as LLVM assembly for AVX512-BF16.

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

MAX_HEADS = 4
"""Query heads of one key head attended at once."""

INT8_ZERO = 64
"""The byte that stands for weight 0: 1 ... 127 are -63 ... 63."""

INT8_OFFSET = 128 + INT8_ZERO
"""What the int8 loops add to every weight; the caller takes it out of the sums."""

_DOT = "@llvm.x86.avx512bf16.dpbf16ps.512"
_SUM = "@llvm.vector.reduce.fadd.v16f32"

_DECLARATIONS = f"""
declare <16 x float> {_DOT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare float {_SUM}(float, <16 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
"""


def module_text(head_dim: int) -> str:
    """Return the module: `matmul_R`, `stream_R`, `matmul8_R`, `score_G` and `mix_G`, all R and G.

    Args:
        head_dim: elements of a key and of a value head, a multiple of 32.
    """
    parts = [_DECLARATIONS]
    for rows in _up_to(MAX_ROWS):
        parts += [
            _matmul(f"matmul_{rows}", rows),
            _matmul(f"matmul8_{rows}", rows, is_int8=True),
            _matmul(f"stream_{rows}", rows, is_read_once=True),
        ]
    parts += [_score(heads, head_dim) for heads in _up_to(MAX_HEADS)]
    parts += [_mix(heads, head_dim) for heads in _up_to(MAX_HEADS)]
    return "\n".join(parts)


def _up_to(count: int) -> range:
    return range(1, count + 1)


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
            f" %x{r}.p = getelementptr i32, ptr %x, i64 %x{r}.1",
            f" %x{r}.s = load i32, ptr %x{r}.p, align 4",
            *_broadcast(f"%x{r}", "i32", f"%x{r}.s"),
            f" %x{r}.v = bitcast <16 x i32> %x{r}.b to <32 x bfloat>",
        ]
        out += [
            f" %b{r}.{v} = call <16 x float> {_DOT}(<16 x float> %a{r}.{v}, "
            f"<32 x bfloat> %w{v}.v, <32 x bfloat> %x{r}.v)"
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


def _score(heads: int, dim: int) -> str:
    """Dot `heads` queries with `%count` keys.

    %query: [heads, dim] bfloat16; %keys: [%count, dim] bfloat16; %out: [heads, %stride] float32.
    """
    parts = range(dim // (2 * LANES))
    out = [
        f"define void @score_{heads}(ptr %query, ptr %keys, ptr %out, i64 %stride, i64 %count) {{",
        "entry:",
    ]
    for h in range(heads):
        for c in parts:
            out += [
                f" %q{h}.{c}.p = getelementptr bfloat, ptr %query, i64 {h * dim + 32 * c}",
                f" %q{h}.{c} = load <32 x bfloat>, ptr %q{h}.{c}.p, align 2",
            ]
    out += [
        " br label %loop\nloop:\n %i = phi i64 [0, %entry], [%next, %loop]",
        f" %k0 = mul i64 %i, {2 * dim}\n %k = getelementptr i8, ptr %keys, i64 %k0",
    ]
    for c in parts:
        out += [
            f" %k{c}.p = getelementptr bfloat, ptr %k, i64 {32 * c}",
            f" %k{c}.v = load <32 x bfloat>, ptr %k{c}.p, align 2",
        ]
    for h in range(heads):
        total = "zeroinitializer"
        for c in parts:
            out.append(
                f" %d{h}.{c} = call <16 x float> {_DOT}(<16 x float> {total}, "
                f"<32 x bfloat> %q{h}.{c}, <32 x bfloat> %k{c}.v)"
            )
            total = f"%d{h}.{c}"
        out += [
            f" %r{h} = call reassoc float {_SUM}(float 0.0, <16 x float> {total})",
            f" %o{h}.0 = mul i64 %stride, {h}\n %o{h}.1 = add i64 %o{h}.0, %i",
            f" %o{h} = getelementptr float, ptr %out, i64 %o{h}.1",
            f" store float %r{h}, ptr %o{h}, align 4",
        ]
    return "\n".join([*out, *_count_loop()])


def _mix(heads: int, dim: int) -> str:
    """Add `%count` values to `heads` sums, each times its weight.

    %weights: [heads, %stride] float32; %values: [%count, dim] bfloat16; %sums: [heads, dim]
    float32.
    """
    parts = [(h, c) for h in range(heads) for c in range(dim // LANES)]
    out = [
        f"define void @mix_{heads}(ptr %weights, i64 %stride, ptr %values,",
        " i64 %count, ptr %sums) {",
        "entry:",
    ]
    for h, c in parts:
        out += [
            f" %s{h}.{c}.p = getelementptr float, ptr %sums, i64 {h * dim + LANES * c}",
            f" %s{h}.{c} = load <16 x float>, ptr %s{h}.{c}.p, align 4",
        ]
    out.append(" br label %loop\nloop:\n %i = phi i64 [0, %entry], [%next, %loop]")
    out += [
        f" %a{h}.{c} = phi <16 x float> [%s{h}.{c}, %entry], [%b{h}.{c}, %loop]" for h, c in parts
    ]
    out.append(f" %v0 = mul i64 %i, {2 * dim}\n %v = getelementptr i8, ptr %values, i64 %v0")
    for c in range(dim // LANES):
        out += [
            f" %v{c}.p = getelementptr i16, ptr %v, i64 {LANES * c}",
            f" %v{c}.h = load <16 x i16>, ptr %v{c}.p, align 2",
            f" %v{c}.w = zext <16 x i16> %v{c}.h to <16 x i32>",
            f" %v{c}.s = shl <16 x i32> %v{c}.w, splat (i32 16)",
            f" %v{c}.f = bitcast <16 x i32> %v{c}.s to <16 x float>",
        ]
    for h in range(heads):
        out += [
            f" %p{h}.0 = mul i64 %stride, {h}\n %p{h}.1 = add i64 %p{h}.0, %i",
            f" %p{h}.p = getelementptr float, ptr %weights, i64 %p{h}.1",
            f" %p{h}.s = load float, ptr %p{h}.p, align 4",
            *_broadcast(f"%p{h}", "float", f"%p{h}.s"),
        ]
    out += [
        f" %b{h}.{c} = call <16 x float> @llvm.fma.v16f32(<16 x float> %p{h}.b, "
        f"<16 x float> %v{c}.f, <16 x float> %a{h}.{c})"
        for h, c in parts
    ]
    stores = [f" store <16 x float> %b{h}.{c}, ptr %s{h}.{c}.p, align 4" for h, c in parts]
    return "\n".join([*out, *_count_loop(stores)])


def _broadcast(name: str, kind: str, scalar: str) -> list[str]:
    """Copy a scalar to all lanes of `name`.b."""
    return [
        f" {name}.e = insertelement <16 x {kind}> poison, {kind} {scalar}, i32 0",
        f" {name}.b = shufflevector <16 x {kind}> {name}.e, <16 x {kind}> poison,",
        " <16 x i32> zeroinitializer",
    ]


def _count_loop(after: list[str] | None = None) -> list[str]:
    """Close a loop over %count, and the function."""
    return [
        " %next = add i64 %i, 1\n %more = icmp slt i64 %next, %count",
        " br i1 %more, label %loop, label %done\ndone:",
        *(after or []),
        " ret void\n}",
    ]
