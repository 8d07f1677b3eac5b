"""Decode steps as CUDA graphs: captured at their first use, one a shape, then replayed.

A decode step of a large model is a thousand small kernels, and an eager forward is as slow as their
launching. Everything that is no decode step, or of a shape too many, runs eagerly; so does all that
follows a failed capture. Knows steps and forwards; knows no session.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specserve.model.kv_pool import KvPool
from specserve.model.planned_forward import PlannedForward, RunPlan
from specserve.model.runner import SequenceSlice
from specserve.model.static_step import StaticStep, StepShape

logger = logging.getLogger(__name__)

MAX_NUM_GRAPHS = 48
"""Each keeps its logits; shapes beyond run eagerly."""

EAGER_FROM_NOW_ON = "every forward is eager from now on"
"""Ends the last line that is logged of a failed capture."""

_NUM_WARM_UPS = 2
"""Forwards before a capture: kernels and workspaces are made outside of it."""


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """How far decode steps are replayed."""

    num_graphs: int
    """Shapes that are replayed now."""
    is_broken: bool
    """Whether a capture has failed: everything is eager since."""


class GraphedForward:
    """A `ModelForward` that replays decode steps."""

    def __init__(self, run: RunPlan, eager: PlannedForward) -> None:
        self._run = run
        self._eager = eager
        self._graphs: dict[StepShape, _Graph] = {}
        self._place: _CapturePlace | None = None
        self._is_broken = False
        self._is_full = False
        """Whether a shape too many was told of."""

    @property
    def counts(self) -> GraphCounts:
        """What was captured so far."""
        return GraphCounts(len(self._graphs), self._is_broken)

    def __call__(self, batch: Sequence[SequenceSlice], pool: KvPool) -> torch.Tensor:
        """Run a batch and write its keys and values; [R, head rows] logits.

        The logits are the graph's own memory: they hold until the next call.
        """
        graph = self._graph_for(batch, pool)
        if graph is None:
            return self._eager(batch, pool)
        rows = graph.step.fill(batch)
        logits = graph.replay()
        self._eager.watch(graph.finite)
        if len(rows) == rows[-1] + 1:  # ascending: these are the first ones
            return logits[: len(rows)]
        return logits.index_select(0, torch.from_numpy(rows).to(logits.device))

    def _graph_for(self, batch: Sequence[SequenceSlice], pool: KvPool) -> _Graph | None:
        shape = StepShape.of(batch, pool.block_size)
        wants_all = all(part.num_logit_rows for part in batch)
        # Where block tails must be cleared the eager forward does it.
        if shape is None or not wants_all or self._is_broken or self._eager.clears_tails():
            return None
        found = self._graphs.get(shape)
        if found is not None:
            return found
        if len(self._graphs) == MAX_NUM_GRAPHS:
            if not self._is_full:
                self._is_full = True
                logger.warning(
                    "%d step shapes are CUDA graphs, which is all there may be: %s, and any other "
                    "new shape, runs eagerly",
                    MAX_NUM_GRAPHS,
                    shape,
                )
            return None
        step = StaticStep(self._run, pool, shape)
        step.fill(batch)
        return self._captured(step)

    def _captured(self, step: StaticStep) -> _Graph | None:
        """Capture a step that is filled in; None, and never again, when that fails."""
        try:
            self._place = self._place or _CapturePlace()
            graph = self._graphs[step.shape] = _Graph(step, self._place)
            return graph
        except RuntimeError as error:
            logger.exception("a capture failed")
            reason = str(error).partition("\n")[0]
        self._is_broken = True
        # None may stay: a graph that is destroyed, as the failed one is, can take with it what the
        # matrix products of its stream's other graphs work in.
        self._graphs.clear()
        self._place = None
        torch.cuda.empty_cache()
        logger.error("no CUDA graph of %s (%s): %s", step.shape, reason, EAGER_FROM_NOW_ON)
        return None


class _CapturePlace:
    """Where graphs are captured: one stream and one memory for them all.

    They run one at a time, and nothing of a run is read after the next one: what one graph leaves
    the others may overwrite.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.memory = torch.cuda.graph_pool_handle()


class _Graph:
    """One captured step."""

    def __init__(self, step: StaticStep, place: _CapturePlace) -> None:
        """Capture a step that is filled in: its forward runs, and writes what it would anyway.

        Raises:
            RuntimeError: it cannot be captured. The current stream is what it was.
        """
        self.step = step
        before, stream = torch.cuda.current_stream(), place.stream
        try:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARM_UPS):
                    step.run()
            before.wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=place.memory, stream=stream):
                self._logits, self.finite = step.run()
        finally:
            # A capture that cannot be ended leaves its own stream as the current one.
            torch.cuda.set_stream(before)

    def replay(self) -> torch.Tensor:
        """Run the step again over what is filled in now."""
        self._graph.replay()
        return self._logits
