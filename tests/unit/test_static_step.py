"""A decode step filled up to a fixed shape says what the ragged one says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from specserve.config import EngineConfig
from specserve.model.cuda_graphs import GraphedForward
from specserve.model.hf_model import load_model, probe_layers
from specserve.model.kv_pool import KvPool
from specserve.model.planned_forward import PlannedForward, model_forward
from specserve.model.runner import SequenceSlice
from specserve.model.static_step import StaticStep, StepShape
from support.tiny_models import VOCAB_SIZE, save_tiny

BLOCK = 4
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(kind: str) -> Path:
        return save_tiny(tmp_path_factory.mktemp(kind), kind)

    return folder


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def tables(rng: random.Random, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Scattered blocks for sequences of these lengths."""
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    found = []
    for length in lengths:
        count = -(-length // BLOCK)
        found.append(tuple(free[:count]))
        free = free[count:]
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt2"])
def test_a_filled_up_step_says_what_the_ragged_one_says(
    kind: str, folder_of: Callable[[str], Path]
) -> None:
    """Batches of one to five sequences with one to five new tokens: the same logits, and the same
    keys and values in the pool, though queries, sequences and blocks are filled up.
    """
    model = load_model(
        EngineConfig(model=kind), folder_of(kind), torch.float32, torch.device("cpu")
    )
    layers = probe_layers(kind, model)
    run = model_forward(model)
    eager = PlannedForward(run, row_by_row=False)
    rng = random.Random(kind)
    for num_sequences in (1, 2, 3, 5):
        pools = [KvPool(layers, NUM_BLOCKS, BLOCK, torch.float32, model.device) for _ in range(2)]
        starts = [rng.randrange(1, 18) for _ in range(num_sequences)]
        counts = [rng.randrange(1, 6) for _ in range(num_sequences)]
        lengths = [a + b for a, b in zip(starts, counts, strict=True)]
        of = tables(rng, lengths)
        prefills = [
            SequenceSlice(ids(rng, start), 0, table, 0)
            for start, table in zip(starts, of, strict=True)
        ]
        batch = [
            SequenceSlice(ids(rng, count), start, table, rng.randrange(1, count + 1))
            for start, count, table in zip(starts, counts, of, strict=True)
        ]
        with torch.inference_mode():
            for pool in pools:
                for prefill in prefills:
                    eager([prefill], pool)
            wanted = eager(batch, pools[0])
            shape = StepShape.of(batch, BLOCK)
            assert shape is not None
            step = StaticStep(run, pools[1], shape)
            # A replay finds the tensors as the step before left them.
            step.fill([SequenceSlice([1], 0, (0,), 1)])
            rows = step.fill(batch)
            logits, finite = step.run()

        assert bool(finite)
        assert torch.allclose(logits[torch.from_numpy(rows)], wanted, atol=1e-5)
        for layer in range(len(layers)):
            held = [pool.slice(layer, 0, NUM_BLOCKS * BLOCK) for pool in pools]
            for ours, theirs in zip(*held, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_step_says_when_what_it_wrote_is_not_finite(folder_of: Callable[[str], Path]) -> None:
    """The flag that stands for a look at every key and value."""
    device = torch.device("cpu")
    model = load_model(EngineConfig(model="llama"), folder_of("llama"), torch.float32, device)
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = float("nan")
    pool = KvPool(probe_layers("llama", model), NUM_BLOCKS, BLOCK, torch.float32, device)
    batch = [SequenceSlice([5], 0, (0,), 1), SequenceSlice([13], 0, (1,), 1)]
    step = StaticStep(model_forward(model), pool, StepShape(2, 1, 1))
    with torch.inference_mode():
        step.fill(batch)
        _, finite = step.run()
        step.fill(batch[:1])
        _, then = step.run()

    assert not bool(finite)
    assert bool(then)


@pytest.mark.parametrize(
    ("parts", "shape"),
    [
        ([(1, 0)], StepShape(1, 1, 1)),
        ([(1, 4)], StepShape(1, 1, 2)),
        ([(5, 11), (1, 3), (2, 0)], StepShape(4, 5, 4)),
        ([(1, 40)] * 5, StepShape(8, 1, 16)),
        ([(1, 3), (17, 0)], None),
        ([], None),
    ],
)
def test_shapes_are_few(parts: list[tuple[int, int]], shape: StepShape | None) -> None:
    """Sequences and blocks are powers of two; a prefill is no decode step."""
    batch = [SequenceSlice([1] * count, start, (), 1) for count, start in parts]

    assert StepShape.of(batch, BLOCK) == shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="here captures succeed")
def test_a_capture_that_fails_is_logged_once_and_everything_goes_on(
    folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Where no graph can be made, every forward is the eager one."""
    device = torch.device("cpu")
    model = load_model(EngineConfig(model="llama"), folder_of("llama"), torch.float32, device)
    layers, run = probe_layers("llama", model), model_forward(model)
    pools = [KvPool(layers, NUM_BLOCKS, BLOCK, torch.float32, device) for _ in range(2)]
    eager = PlannedForward(run, row_by_row=False)
    graphed = GraphedForward(run, PlannedForward(run, row_by_row=False))
    for start in range(3):
        batch = [SequenceSlice([7 + start], start, (4,), 1), SequenceSlice([9], start, (2,), 1)]
        with torch.inference_mode():
            assert torch.equal(graphed(batch, pools[1]), eager(batch, pools[0]))

    assert caplog.text.count("every forward is eager from now on") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_graph_says_what_the_eager_forward_says(
    folder_of: Callable[[str], Path],
) -> None:
    """Step after step of one shape and of several, over one pool each."""
    device = torch.device("cuda")
    model = load_model(EngineConfig(model="llama"), folder_of("llama"), torch.float32, device)
    layers, run = probe_layers("llama", model), model_forward(model)
    pools = [KvPool(layers, NUM_BLOCKS, BLOCK, torch.float32, device) for _ in range(2)]
    eager = PlannedForward(run, row_by_row=False)
    graphed = GraphedForward(run, PlannedForward(run, row_by_row=False))
    rng = random.Random(3)
    of = tables(rng, [40, 40, 40])
    for start in range(30):
        count = 1 + start % 3
        batch = [
            SequenceSlice(ids(rng, count), start, table, count) for table in of[: 1 + start % 3]
        ]
        with torch.inference_mode():
            assert torch.allclose(graphed(batch, pools[1]), eager(batch, pools[0]), atol=1e-4)

    assert graphed.counts.num_graphs > 0
    assert not graphed.counts.is_broken
