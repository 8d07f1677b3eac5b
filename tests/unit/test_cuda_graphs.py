"""Captures of decode steps, over a CUDA that only keeps account: no GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from specserve.model import cuda_graphs
from specserve.model.cuda_graphs import EAGER_FROM_NOW_ON, GraphCounts, GraphedForward
from specserve.model.kv_pool import KvPool, LayerShape
from specserve.model.paged_batch import BatchPlan
from specserve.model.planned_forward import PlannedForward
from specserve.model.runner import SequenceSlice

POOL = KvPool([LayerShape(1, 4, 4)], 32, 4, torch.float32, torch.device("cpu"))


class Stream:
    """Waits for nobody."""

    def wait_stream(self, other: Stream) -> None:
        """There is nothing to wait for."""


class Cuda:
    """What `torch.cuda` is asked for; a capture runs what it captures, and a replay nothing."""

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.num_streams = self.num_memories = self.num_emptied = 0
        self.captures: list[tuple[Stream, object]] = []
        self.fails = False

    def Stream(self) -> Stream:
        self.num_streams += 1
        return Stream()

    def graph_pool_handle(self) -> object:
        self.num_memories += 1
        return object()

    def current_stream(self) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def empty_cache(self) -> None:
        self.num_emptied += 1

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    class CUDAGraph:
        def replay(self) -> None:
            """What was captured has run."""

    @contextlib.contextmanager
    def graph(self, graph: object, pool: object, stream: Stream) -> Iterator[None]:
        """As torch's own: where the capture cannot be ended, its stream stays the current one."""
        before, self.current = self.current, stream
        yield
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore words")
        self.captures.append((stream, pool))
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    for name in (
        "Stream",
        "graph_pool_handle",
        "current_stream",
        "set_stream",
        "empty_cache",
        "stream",
        "CUDAGraph",
        "graph",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


class Run:
    """A model of one layer: token ids are its logits."""

    def __call__(self, plan: BatchPlan, paged: object) -> torch.Tensor:
        keys = plan.token_ids.float()[None, :, None].expand(1, -1, 4)
        paged.write(0, keys, keys)
        return plan.token_ids.float()[plan.logit_rows, None]


@pytest.fixture
def graphed(cuda: Cuda) -> GraphedForward:
    run = Run()
    return GraphedForward(run, PlannedForward(run, row_by_row=False))


def step(num_sequences: int, token_id: int = 7) -> Sequence[SequenceSlice]:
    return [SequenceSlice([token_id + i], 0, (i,), 1) for i in range(num_sequences)]


def test_all_graphs_share_one_stream_and_one_memory(cuda: Cuda, graphed: GraphedForward) -> None:
    """Each shape is captured once, in the place of the first; the current stream stays."""
    for count in (1, 2, 4, 2, 1):
        assert graphed(step(count), POOL)[:, 0].tolist() == [7 + i for i in range(count)]

    assert graphed.counts == GraphCounts(num_graphs=3, is_broken=False)
    assert (cuda.num_streams, cuda.num_memories) == (1, 1)
    assert len(cuda.captures) == 3
    assert len(set(cuda.captures)) == 1
    assert cuda.captures[0][0] is not cuda.default
    assert cuda.current is cuda.default
    assert cuda.num_emptied == 0


def test_a_failed_capture_leaves_no_graph_no_stream_and_no_memory(
    cuda: Cuda, graphed: GraphedForward, caplog: pytest.LogCaptureFixture
) -> None:
    """The graphs made before go too, and whoever counts sees it; answers stay right."""
    graphed(step(1), POOL)
    cuda.fails = True
    answers = [graphed(step(count, 30 + count), POOL)[:, 0].tolist() for count in (2, 2, 1)]

    assert answers == [[32, 33], [32, 33], [31]]
    assert graphed.counts == GraphCounts(num_graphs=0, is_broken=True)
    assert cuda.current is cuda.default
    assert cuda.num_emptied == 1
    assert len(cuda.captures) == 1
    last = caplog.records[-1].getMessage()
    assert last.endswith(f"(operation not permitted when stream is capturing): {EAGER_FROM_NOW_ON}")
    assert caplog.text.count(EAGER_FROM_NOW_ON) == 1


def test_a_warm_up_that_fails_counts_as_a_failed_capture(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may run out before the capture begins."""
    run: Callable[..., torch.Tensor] = Run()

    def out_of_memory(plan: BatchPlan, paged: object) -> torch.Tensor:
        if cuda.current is not cuda.default:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(plan, paged)

    graphed = GraphedForward(out_of_memory, PlannedForward(out_of_memory, row_by_row=False))

    assert graphed(step(2), POOL)[:, 0].tolist() == [7, 8]
    assert graphed.counts == GraphCounts(num_graphs=0, is_broken=True)
    assert cuda.current is cuda.default


def test_a_shape_too_many_is_told_of_once_and_runs_eagerly(
    cuda: Cuda,
    graphed: GraphedForward,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else a deployment is slow in some batches and nothing says why."""
    monkeypatch.setattr(cuda_graphs, "MAX_NUM_GRAPHS", 2)

    for count in (1, 2, 4, 8, 4):
        assert graphed(step(count), POOL)[:, 0].tolist() == [7 + i for i in range(count)]

    assert graphed.counts == GraphCounts(num_graphs=2, is_broken=False)
    assert len(cuda.captures) == 2
    assert caplog.text.count("runs eagerly") == 1


def test_a_prefill_is_no_graph(cuda: Cuda, graphed: GraphedForward) -> None:
    """Counts tell that nothing was captured."""
    graphed([SequenceSlice(list(range(20)), 0, tuple(range(8, 13)), 1)], POOL)

    assert graphed.counts == GraphCounts(num_graphs=0, is_broken=False)
