"""The two inner loops of attention, as LLVM assembly for AVX512-BF16.

Keys and values lie in their blocks so that no sum runs across a register's lanes: a register holds
16 positions of a key's element, or 16 elements of a value, each beside its neighbour in a pair that
one instruction multiplies. All query vectors of a call share what is loaded. Each one is computed
in the same order however many there are. Knows registers; knows no model.
"""

from __future__ import annotations

from specserve.model.compiled.assembly import DOT, LANES, MAX_ROWS, load_pair

MAX_HEADS = 4
"""Query heads of one key head attended at once."""

MAX_VECTORS = MAX_ROWS * MAX_HEADS
"""Query vectors scored at once: as many sums, a key and a broadcast fit 32 registers."""


def max_mixed(head_dim: int) -> int:
    """Return how many vectors are mixed at once: their sums take 24 registers."""
    return max(1, min(MAX_ROWS, 24 * LANES // head_dim))


def attention_text(head_dim: int) -> str:
    """Return `score_RxG` of all rows R and heads G, and `mix_N` of all N up to `max_mixed`."""
    shapes = [(r, g) for r in range(1, MAX_ROWS + 1) for g in range(1, MAX_HEADS + 1)]
    return "\n".join(
        [_score(rows, heads, head_dim) for rows, heads in shapes]
        + [_mix(count, head_dim) for count in range(1, max_mixed(head_dim) + 1)]
    )


def _score(rows: int, heads: int, dim: int) -> str:
    """Dot the queries of `rows` rows and `heads` heads with keys, 16 positions at a time.

    %query: row r at r * %row bytes, its heads [heads, dim] bfloat16 side by side; %chunks:
    [%count, 2] int64, a chunk's place in a row of %out and its bytes from %keys; a chunk's pair of
    elements lies %step bytes behind the pair before; %out: [rows * heads, %stride] float32.
    """
    vectors = [(r, h) for r in range(rows) for h in range(heads)]
    out = [
        f"define void @score_{rows}x{heads}(ptr %query, i64 %row, ptr %keys, ptr %chunks,",
        " i64 %count, i64 %step, ptr %out, i64 %stride) {",
        "entry:",
        *(
            f" %r{r}.b = mul i64 %row, {r}\n %r{r} = getelementptr i8, ptr %query, i64 %r{r}.b"
            for r in range(rows)
        ),
        " br label %chunk",
        "chunk:\n %i = phi i64 [0, %entry], [%next_i, %store]",
        " %c = getelementptr [2 x i64], ptr %chunks, i64 %i\n %at = load i64, ptr %c",
        " %o.p = getelementptr i64, ptr %c, i64 1\n %o = load i64, ptr %o.p",
        " %k0 = getelementptr i8, ptr %keys, i64 %o\n br label %loop",
        "loop:\n %d = phi i64 [0, %chunk], [%next_d, %loop]",
        " %k = phi ptr [%k0, %chunk], [%next_k, %loop]",
        *(
            f" %a{r}.{h} = phi <16 x float> [zeroinitializer, %chunk], [%b{r}.{h}, %loop]"
            for r, h in vectors
        ),
        " %v = load <32 x bfloat>, ptr %k, align 4",
    ]
    for r, h in vectors:
        name = f"%x{r}.{h}"
        out += [f" {name}.d = add i64 %d, {h * dim // 2}"]
        out += load_pair(name, f"%r{r}", f"{name}.d")
        out.append(
            f" %b{r}.{h} = call <16 x float> {DOT}(<16 x float> %a{r}.{h}, "
            f"<32 x bfloat> %v, <32 x bfloat> {name})"
        )
    out += [
        " %next_k = getelementptr i8, ptr %k, i64 %step",
        f" %next_d = add i64 %d, 1\n %more = icmp slt i64 %next_d, {dim // 2}",
        " br i1 %more, label %loop, label %store\nstore:",
    ]
    for r, h in vectors:
        out += [
            f" %y{r}.{h}.0 = mul i64 %stride, {r * heads + h}",
            f" %y{r}.{h}.1 = add i64 %y{r}.{h}.0, %at",
            f" %y{r}.{h} = getelementptr float, ptr %out, i64 %y{r}.{h}.1",
            f" store <16 x float> %b{r}.{h}, ptr %y{r}.{h}, align 4",
        ]
    out += [
        " %next_i = add i64 %i, 1\n %another = icmp slt i64 %next_i, %count",
        " br i1 %another, label %chunk, label %done\ndone:\n ret void\n}",
    ]
    return "\n".join(out)


def _mix(count: int, dim: int) -> str:
    """Add values to `count` sums, each times its weight, two positions at a time.

    %weights: [count, %stride] bfloat16, from the first pair on; %offsets: [%pairs] bytes from
    %values to each pair's [dim, 2] bfloat16; %half: unless 0, one more pair follows whose second
    position is left out, whatever lies there; %sums: [count, dim] float32.
    """
    sums = [(n, c) for n in range(count) for c in range(dim // LANES)]
    out = [
        f"define void @mix_{count}(ptr %weights, i64 %stride, ptr %values, ptr %offsets,",
        " i64 %pairs, i64 %half, ptr %sums) {",
        "entry:",
    ]
    for n in range(count):
        out += [
            f" %w{n}.0 = mul i64 %stride, {n}",
            f" %w{n} = getelementptr i16, ptr %weights, i64 %w{n}.0",
        ]
    for n, c in sums:
        out += [
            f" %s{n}.{c}.p = getelementptr float, ptr %sums, i64 {n * dim + LANES * c}",
            f" %s{n}.{c} = load <16 x float>, ptr %s{n}.{c}.p, align 4",
        ]
    out.append(" %any = icmp sgt i64 %pairs, 0\n br i1 %any, label %loop, label %rest")
    out.append("loop:\n %i = phi i64 [0, %entry], [%next, %loop]")
    out += [
        f" %a{n}.{c} = phi <16 x float> [%s{n}.{c}, %entry], [%b{n}.{c}, %loop]" for n, c in sums
    ]
    out += _mixed_pair(count, dim, "%i", ("b", "a"), is_half=False)
    out += [
        " %next = add i64 %i, 1\n %more = icmp slt i64 %next, %pairs",
        " br i1 %more, label %loop, label %rest\nrest:",
    ]
    out += [
        f" %c{n}.{c} = phi <16 x float> [%s{n}.{c}, %entry], [%b{n}.{c}, %loop]" for n, c in sums
    ]
    out.append(" %odd = icmp ne i64 %half, 0\n br i1 %odd, label %last, label %store\nlast:")
    out += _mixed_pair(count, dim, "%pairs", ("d", "c"), is_half=True)
    out.append(" br label %store\nstore:")
    out += [
        f" %e{n}.{c} = phi <16 x float> [%c{n}.{c}, %rest], [%d{n}.{c}, %last]" for n, c in sums
    ]
    out += [f" store <16 x float> %e{n}.{c}, ptr %s{n}.{c}.p, align 4" for n, c in sums]
    return "\n".join([*out, " ret void\n}"])


def _mixed_pair(
    count: int, dim: int, index: str, names: tuple[str, str], *, is_half: bool
) -> list[str]:
    """Add one pair of positions: the sums of the second name become those of the first."""
    to, given = names
    out = [
        f" %{to}.o.p = getelementptr i64, ptr %offsets, i64 {index}",
        f" %{to}.o = load i64, ptr %{to}.o.p",
        f" %{to}.v = getelementptr i8, ptr %values, i64 %{to}.o",
    ]
    for c in range(dim // LANES):
        value = f"%{to}.v{c}"
        out.append(f" {value}.p = getelementptr <32 x bfloat>, ptr %{to}.v, i64 {c}")
        if is_half:
            out += [
                f" {value}.i = load <16 x i32>, ptr {value}.p, align 4",
                f" {value}.m = and <16 x i32> {value}.i, splat (i32 65535)",
                f" {value} = bitcast <16 x i32> {value}.m to <32 x bfloat>",
            ]
        else:
            out.append(f" {value} = load <32 x bfloat>, ptr {value}.p, align 4")
    for n in range(count):
        out += load_pair(f"%{to}.x{n}", f"%w{n}", index)
        out += [
            f" %{to}{n}.{c} = call <16 x float> {DOT}(<16 x float> %{given}{n}.{c}, "
            f"<32 x bfloat> %{to}.v{c}, <32 x bfloat> %{to}.x{n})"
            for c in range(dim // LANES)
        ]
    return out
