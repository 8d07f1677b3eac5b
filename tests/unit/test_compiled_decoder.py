"""The compiled forward against plain transformers and against itself."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit
from safetensors.torch import load_file, save_file

from specserve.config import EngineConfig
from specserve.model.compiled.assembly import MAX_ROWS
from specserve.model.compiled.code_cache import can_make, package_stamp, stamp_of
from specserve.model.compiled.decoder import CompiledDecoder
from specserve.model.compiled.forward import run
from specserve.model.compiled.kernels import (
    INT8_STEPS,
    PanelStore,
    compile_kernels,
    padded_outputs,
    processor_has_kernels,
)
from specserve.model.compiled.operations import exp, matmul, to_bf16
from specserve.model.engine import Engine
from specserve.model.hf_runner import HuggingFaceRunner
from specserve.model.messages import ProposeReply
from specserve.model.runner import NO_IDS, SequenceSlice
from support.engines import Caller
from support.engines import run as run_engine
from support.tiny_models import VOCAB_SIZE, plain_logits, save_tiny

pytestmark = [
    pytest.mark.skipif(not processor_has_kernels(), reason="needs AVX512-BF16"),
    pytest.mark.slow,
]

SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"hidden_size": 128}),
    "one key head each": ("llama", {"hidden_size": 128, "num_key_value_heads": 4}),
    "heads of 64": ("llama", {"hidden_size": 192, "num_attention_heads": 3, "head_dim": 64}),
    "seven to one": (
        "llama",
        {"hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "biases": ("qwen2", {"hidden_size": 128}),
    "output bias": ("llama", {"hidden_size": 128, "attention_bias": True}),
    "window": ("mistral", {"hidden_size": 128, "sliding_window": 6}),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = SHAPES[request.param]
    if request.param == "heads of 64":
        changes = {**changes, "num_key_value_heads": 3}
    return save_tiny(tmp_path_factory.mktemp("model"), kind, **{"intermediate_size": 98, **changes})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "llama", hidden_size=128)


def load(folder: Path, **settings: object) -> HuggingFaceRunner:
    runner = load_any(folder, **settings)
    assert isinstance(runner._forward, CompiledDecoder)
    return runner


def load_any(folder: Path, **settings: object) -> HuggingFaceRunner:
    config = EngineConfig(
        **{
            "model": str(folder),
            "block_size": 4,
            "num_kv_blocks": 128,
            "num_threads": 1,
            **settings,
        }
    )
    return HuggingFaceRunner.load(config, folder, VOCAB_SIZE, torch.bfloat16, torch.device("cpu"))


def tokens(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(count)]


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got - wanted).norm() / wanted.norm())


def run_in_pieces(
    runner: HuggingFaceRunner, sequences: Sequence[Sequence[int]], seed: int
) -> list[torch.Tensor]:
    """Run sequences in random pieces, batches and blocks; all logits of each."""
    source = random.Random(seed)
    free = list(range(runner.info.num_blocks))
    source.shuffle(free)
    tables = [[free.pop() for _ in range(-(-len(s) // 4))] for s in sequences]
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        parts = []
        for i, ids in enumerate(sequences):
            count = min(source.choice([0, 1, 1, 5, 3, 20]), len(ids) - done[i])
            if count:
                piece = ids[done[i] : done[i] + count]
                parts.append((i, SequenceSlice(piece, done[i], tables[i], count)))
                done[i] += count
        source.shuffle(parts)
        if parts:
            answer = runner.forward([part for _, part in parts])
            sizes = [len(part.token_ids) for _, part in parts]
            for (i, _), rows in zip(parts, answer.split(sizes), strict=True):
                logits[i].append(rows)
    return [torch.cat(rows) for rows in logits]


def test_it_answers_like_transformers(folder):
    """Random pieces of five sequences over shuffled blocks: within 5 % of float32's norm."""
    sequences = [tokens(i, n) for i, n in enumerate((3, 45, 21, 30, 70))]
    got = run_in_pieces(load(folder), sequences, seed=1)
    for rows, wanted in zip(got, plain_logits(folder, sequences), strict=True):
        assert distance(rows, wanted) < 0.05


def test_no_bit_depends_on_batch_blocks_or_pieces(folder):
    """Any pieces, neighbours and blocks: every row equals decoding its sequence alone."""
    runner = load(folder)
    sequences = [tokens(i, n) for i, n in enumerate((3, 45, 21, 30, 70))]
    alone = []
    for ids in sequences:
        table = tuple(range(-(-len(ids) // 4)))
        alone.append(
            torch.cat(
                [runner.forward([SequenceSlice([x], t, table, 1)]) for t, x in enumerate(ids)]
            )
        )
    for seed in range(3):
        for got, wanted in zip(run_in_pieces(runner, sequences, seed), alone, strict=True):
            assert torch.equal(got, wanted)


def test_a_draft_in_int8_stays_near_itself(folder):
    """Weights of 8 bits: the logits move by a fraction of their norm, but they do move."""
    ids, table = tokens(5, 40), tuple(range(10))
    plain = load(folder).forward([SequenceSlice(ids, 0, table, 40)])
    small = load(folder, quantization="int8").forward([SequenceSlice(ids, 0, table, 40)])
    assert 0.0 < distance(small, plain) < 0.2


def test_rows_that_are_not_asked_for_have_no_logits(llama):
    """A prefill chunk gives none; the last two of five are the last two."""
    runner = load(llama)
    ids = tokens(3, 9)
    everything = runner.forward([SequenceSlice(ids, 0, (0, 1, 2), 9)])
    assert runner.forward([SequenceSlice(ids[:4], 0, (3, 4, 5), 0)]).shape == (0, VOCAB_SIZE)
    rest = runner.forward(
        [SequenceSlice(ids[4:], 4, (3, 4, 5), 2), SequenceSlice(ids, 0, (6, 7, 8), 1)]
    )
    assert torch.equal(rest, torch.cat([everything[7:], everything[8:]]))


def test_a_broken_session_harms_nobody(llama, tmp_path):
    """NaN in one row: its sequence's later rows are NaN, neighbours and heirs keep every bit."""
    for path in llama.iterdir():
        (tmp_path / path.name).symlink_to(path)
    weights = load_file(llama / "model.safetensors")
    weights["model.embed_tokens.weight"][13] = float("nan")
    (tmp_path / "model.safetensors").unlink()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = load(tmp_path)
    good = [i for i in tokens(11, 9) if i != 13]
    alone = runner.forward([SequenceSlice(good, 0, (0, 1, 2), len(good))])
    assert torch.isfinite(alone).all()
    neighbour = SequenceSlice(good, 0, (0, 1, 2), len(good))
    logits = runner.forward([SequenceSlice([13, 5, 6, 7, 8, 9], 0, (5, 6), 6), neighbour])
    assert torch.isnan(logits[:6]).all()
    assert torch.equal(logits[6:], alone)
    heir = runner.forward([SequenceSlice(good, 0, (6, 5, 7), len(good))])
    assert torch.equal(heir, alone)


def test_a_broken_token_harms_no_row_before_it(llama, tmp_path):
    """NaN in a drafted token: the rows before it in its forward keep every bit, odd or even."""
    for path in llama.iterdir():
        (tmp_path / path.name).symlink_to(path)
    weights = load_file(llama / "model.safetensors")
    weights["model.embed_tokens.weight"][13] = float("nan")
    (tmp_path / "model.safetensors").unlink()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = load(tmp_path)
    ids = [i for i in tokens(11, 20) if i != 13][:12]
    alone = runner.forward([SequenceSlice(ids, 0, (0, 1, 2), 12)])
    for cut in range(1, 12):
        broken = SequenceSlice([*ids[:cut], 13, 5], 0, (4, 5, 6, 7), cut + 2)
        logits = runner.forward([broken])
        assert torch.equal(logits[:cut], alone[:cut])
        assert torch.isnan(logits[cut:]).all()


def test_the_size_of_blocks_changes_no_bit(folder):
    """Blocks below, beside and above a register's 16 positions; a copied block goes on alike."""
    ids = tokens(4, 70)
    wanted = load(folder).forward([SequenceSlice(ids, 0, tuple(range(18)), 70)])
    for size in (2, 6, 16, 24, 64):
        runner = load(folder, block_size=size)
        table = list(range(100, 0, -1))[: -(-70 // size)]
        for begin, end in ((0, 33), (33, 38), (38, 70)):
            if begin == 38:
                # Another session takes over what is held so far: its last block is copied.
                last = begin // size
                runner.copy_block(table[last], 3)
                table[last] = 3
            piece = SequenceSlice(ids[begin:end], begin, table, end - begin)
            assert torch.equal(runner.forward([piece]), wanted[begin:end])


def test_blocks_of_an_odd_size_are_left_to_the_other_forward(llama):
    """Values lie in pairs of positions."""
    ids = tokens(4, 20)
    runner = load_any(llama, block_size=5)
    assert not isinstance(runner._forward, CompiledDecoder)
    got = runner.forward([SequenceSlice(ids, 0, (3, 1, 2, 0), 20)])
    assert distance(got, plain_logits(llama, [ids])[0]) < 0.05


def test_a_cut_head_keeps_its_columns(llama, tmp_path):
    """draft_vocab.json: five columns, equal to the whole head's."""
    for path in llama.iterdir():
        (tmp_path / path.name).symlink_to(path)
    kept = [40, 2, 63, 17, 5]
    (tmp_path / "draft_vocab.json").write_text(json.dumps({"token_ids": kept}))
    ids = tokens(9, 6)
    whole = load(llama).forward([SequenceSlice(ids, 0, (0, 1), 6)])
    cut = load(tmp_path).forward([SequenceSlice(ids, 0, (0, 1), 6)])
    assert torch.equal(cut, whole[:, sorted(kept)])


@pytest.mark.parametrize(
    ("is_cut", "context"),
    [(False, ()), (True, ()), (True, (3, 9, 20, 62))],
    ids=["whole head", "cut head", "cut head and more ids"],
)
def test_a_guess_in_one_call_is_that_of_many_forwards(llama, tmp_path, is_cut, context):
    """Tokens, confidences, the end of the guess, and what it leaves in the pool."""
    for path in llama.iterdir():
        (tmp_path / path.name).symlink_to(path)
    if is_cut:
        (tmp_path / "draft_vocab.json").write_text(json.dumps({"token_ids": [40, 2, 63, 17, 5]}))
    runner = load(tmp_path, quantization="int8")
    assert runner.guess is not None
    table, lengths, guessed = tuple(range(10)), set(), set()
    more = np.array(context, np.int64)
    for seed, least in itertools.product(range(3), (0.0, 0.3)):
        ids = tokens(seed, 9)
        batch = [SequenceSlice(ids, 0, table, 1, more)]
        logits = runner.forward(batch)
        kept = runner.columns(batch)
        got = runner.guess(logits, 9, table, 6, least, kept, more)
        after = runner.forward([SequenceSlice([7], 8 + len(got.token_ids), table, 1)])
        logits = runner.forward(batch)
        wanted: list[int] = []
        confidences: list[float] = []
        while len(wanted) < 6 and math.prod(confidences) >= least:
            if wanted:
                step = SequenceSlice(wanted[-1:], 8 + len(wanted), table, 1, more)
                logits = runner.forward([step])
            column = int(logits.argmax())
            wanted.append(column if kept is None else int(kept[column]))
            confidences.append(float(logits.softmax(1)[0, column]))
        assert got.token_ids == wanted
        assert got.confidences == pytest.approx(confidences, rel=1e-5)
        assert torch.equal(runner.forward([SequenceSlice([7], 8 + len(wanted), table, 1)]), after)
        lengths.add(len(wanted))
        guessed.update(wanted)
    assert len(lengths) > 1
    assert not context or guessed & set(context)


def test_a_guess_stops_before_a_row_that_is_no_number(llama):
    """NaN and infinity are for the sampler to judge; of equal logits the first column is taken."""
    runner = load(llama)
    assert runner.guess is not None
    row = torch.linspace(-5, 5, VOCAB_SIZE)[None]
    for bad in (math.nan, math.inf, -math.inf):
        row[0, 3] = bad
        assert runner.guess(row, 1, (0,), 1, 0.0, None, NO_IDS).token_ids == []
    row[0, 3] = row[0, 9] = 6.0
    assert runner.guess(row, 1, (0,), 1, 0.0, None, NO_IDS).token_ids == [3]
    row[0] = torch.linspace(-9, -1, VOCAB_SIZE)
    row[0, 11], row[0, 12] = -0.0, 0.0
    assert runner.guess(row, 1, (0,), 1, 0.0, None, NO_IDS).token_ids == [11]


def test_an_engine_guesses_the_same_either_way(llama):
    """Alone in one call, beside another session token by token; every block is accounted for."""
    config = EngineConfig(model=str(llama), block_size=4, num_kv_blocks=64, num_threads=1)
    engines = [
        Engine(load(llama), config, role="draft", draft_confidence_threshold=0.1) for _ in range(2)
    ]
    run_engine(engines[1], Caller("beside", [1]).propose(0))  # which answered a moment ago
    callers = [Caller("a", [1, 2, 3]) for _ in engines]
    source, num_guessed = random.Random(5), 0
    for _ in range(20):
        replies = []
        for engine, caller in zip(engines, callers, strict=True):
            before = engine.load.num_iterations
            (reply,) = run_engine(engine, caller.propose(5))
            assert isinstance(reply, ProposeReply)
            held = [s.blocks.blocks for s in engine._sessions if s.blocks is not None]
            lengths = [-(-s.cached_length // 4) for s in engine._sessions]
            assert [len(blocks) for blocks in held] == lengths
            replies.append(reply)
            assert engine.load.num_iterations - before == len(reply.draft_token_ids)
        assert replies[0].draft_token_ids == replies[1].draft_token_ids
        assert replies[0].cached_length == replies[1].cached_length
        num_guessed += len(replies[0].draft_token_ids)
        accepted = replies[0].draft_token_ids[: source.randrange(6)]
        for caller, reply in zip(callers, replies, strict=True):
            caller.heard(reply, len(accepted))
            caller.committed.append([*accepted, 9])
    assert num_guessed > 20


def test_a_draft_compiles_its_guesses_before_the_first_call(llama):
    """Else a new installation's first proposal is some seconds late."""
    runner, asked = load(llama), []
    guess = runner.guess
    assert guess is not None
    runner._guess = lambda *arguments: asked.append(arguments) or guess(*arguments)
    config = EngineConfig(model=str(llama))
    Engine(runner, config, role="target")
    assert not asked
    Engine(runner, config, role="draft")
    assert len(asked) == 1


def test_long_contexts_grow_the_table_of_angles(llama):
    """Positions beyond the first table, up to the model's context."""
    folder_ids = tokens(2, 128)
    runner = load(llama)
    forward = runner._forward
    assert isinstance(forward, CompiledDecoder)
    forward._cos, forward._sin = forward._angles(8)
    got = runner.forward([SequenceSlice(folder_ids, 0, tuple(range(32)), 128)])
    assert distance(got, plain_logits(llama, [folder_ids])[0]) < 0.05


def test_a_table_of_angles_that_grows_bends_none(tmp_path):
    """Beyond the context some rope types give other angles to all positions, those cached too."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = save_tiny(tmp_path, "llama", hidden_size=128, rope_parameters=rope)
    forward = load(folder)._forward
    assert isinstance(forward, CompiledDecoder)
    forward._cos, forward._sin = kept, _ = forward._angles(100)
    forward._reach(101)
    assert len(forward._cos) == 128
    np.testing.assert_array_equal(forward._cos[:100], kept)


@pytest.mark.parametrize("is_int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 2), (1, 64), (130, 96), (200, 1030)])
def test_products_equal_float64_and_never_depend_on_other_rows(outputs, inputs, is_int8):
    """1 to 20 rows: near float64's sum, and every row's bits as when it is alone."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    rows = torch.randn(20, inputs, generator=generator).bfloat16()
    store = PanelStore(padded_outputs(outputs) * inputs, is_int8=is_int8)
    addresses = np.array(store.add(weight))
    kernels = compile_kernels(32)
    given = weight.double()
    if is_int8:
        steps = given.abs().amax(1, keepdim=True).float() / INT8_STEPS
        given = ((weight.float() / steps).round() * steps).double()
        assert (given - weight.double()).abs().max() <= steps.max() / 2 + 1e-6
    wanted = (rows.double() @ given.T).numpy()
    alone: np.ndarray | None = None
    for count in (1, 2, 3, 4, 5, MAX_ROWS, 7, 8, 13, 20):
        out = np.full((count, padded_outputs(outputs)), np.nan, np.float32)
        matmul(
            kernels.matmul8 if is_int8 else kernels.matmul,
            addresses,
            store.element_bytes,
            rows[:count].view(torch.uint16).numpy(),
            out,
        )
        assert np.abs(out[:, :outputs] - wanted[:count]).max() < 1e-4 * inputs**0.5
        assert (out[:, outputs:] == 0).all()
        alone = out if alone is None else alone
        assert (out[0] == alone[0]).all()
        if not is_int8 and count <= MAX_ROWS:
            streamed = np.empty_like(out)
            packed = rows[:count].view(torch.uint16).numpy()
            matmul(kernels.stream, addresses, store.element_bytes, packed, streamed)
            assert (streamed == out).all()


@njit
def _round_all(values, out):
    for i in range(len(values)):
        out[i] = to_bf16(values[i])


@njit
def _exp_all(values, out):
    for i in range(len(values)):
        out[i] = exp(values[i])


def test_rounding_to_bfloat16_is_torchs():
    """Ties, signs, zeros, infinities, subnormals and random bits; a NaN stays a NaN."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64)
    edges = [0, 1 << 31, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1, 0x8000]
    nans = [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]
    values = np.array([*bits, *edges, *nans]).astype(np.uint32).view(np.float32)
    out = np.empty(len(values), np.uint16)
    _round_all(values, out)
    got = torch.from_numpy(out).view(torch.bfloat16)
    wanted = torch.from_numpy(values).bfloat16()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got[~got.isnan()], wanted[~wanted.isnan()])


def test_the_exponential_is_accurate():
    """Relative error below 2e-7 from -87 to 88; beyond it saturates."""
    values = np.linspace(-87, 88, 100_001).astype(np.float32)
    out = np.empty_like(values)
    _exp_all(values, out)
    wanted = np.exp(values.astype(np.float64))
    assert (np.abs(out - wanted) / wanted).max() < 2e-7
    ends = np.array([-np.inf, -1000, 1000], np.float32)
    _exp_all(ends, out[:3])
    assert out[0] == out[1] < 1e-37
    assert np.isfinite(out[2])


def test_a_cache_folder_may_still_have_to_be_made(tmp_path: Path) -> None:
    """As NUMBA_CACHE_DIR in an image names one: else every start would compile for seconds."""
    (tmp_path / "file").touch()

    assert can_make(tmp_path)
    assert can_make(tmp_path / "not" / "yet")
    assert not can_make(tmp_path / "file" / "below")


def test_kept_code_is_of_todays_sources_whichever_file_changed(tmp_path):
    """What is compiled calls across files: another constant anywhere makes it other code."""
    (tmp_path / "one.py").write_text("A = 1")
    (tmp_path / "other.py").write_text("B = 1")
    before = stamp_of(tmp_path)
    assert stamp_of(tmp_path) == before
    (tmp_path / "other.py").write_text("B = 2")
    assert stamp_of(tmp_path) != before
    for function in (run, matmul):
        assert function._cache._impl.locator.get_source_stamp() == package_stamp()
