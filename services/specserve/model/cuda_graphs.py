"""Decode steps as CUDA graphs: captured at their first use, one a shape, then replayed.

A decode step of a large model is a thousand small kernels, and an eager forward is as slow as their
launching. Everything that is no decode step, or of a shape too many, runs eagerly; so does all that
follows a failed capture. Knows steps and forwards; knows no session.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from specserve.model.kv_pool import KvPool
from specserve.model.planned_forward import PlannedForward, RunPlan
from specserve.model.runner import SequenceSlice
from specserve.model.static_step import StaticStep, StepShape

logger = logging.getLogger(__name__)

MAX_NUM_GRAPHS = 48
"""Each keeps its logits; shapes beyond run eagerly."""

_NUM_WARM_UPS = 2
"""Forwards before a capture: kernels and workspaces are made outside of it."""


class GraphedForward:
    """A `ModelForward` that replays decode steps."""

    def __init__(self, run: RunPlan, eager: PlannedForward) -> None:
        self._run = run
        self._eager = eager
        self._graphs: dict[StepShape, _Graph] = {}
        self._is_broken = False

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
        if found is None and len(self._graphs) < MAX_NUM_GRAPHS:
            step = StaticStep(self._run, pool, shape)
            step.fill(batch)
            try:
                found = self._graphs[shape] = _Graph(step)
            except RuntimeError:
                logger.exception("no CUDA graph of %s; every forward is eager from now on", shape)
                self._is_broken = True
        return found


class _Graph:
    """One captured step."""

    def __init__(self, step: StaticStep) -> None:
        """Capture a step that is filled in: its forward runs, and writes what it would anyway."""
        self.step = step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                step.run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits, self.finite = step.run()

    def replay(self) -> torch.Tensor:
        """Run the step again over what is filled in now."""
        self._graph.replay()
        return self._logits
