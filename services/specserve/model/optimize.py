"""Choose how a loaded model is run, and see that the faster way still says the same.

On a CPU, models of the Llama family are compiled whole where processor and number type allow it
(`compiled`), else get a forward of their own (`fused_decoder`); any other model keeps its code and
gets packed linear layers. Knows models; knows no session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specserve.config import Quantization
from specserve.errors import ConfigurationError
from specserve.model.fused_decoder import FusedDecoder
from specserve.model.kv_pool import KvPool, LayerShape
from specserve.model.packed_linear import can_pack, pack_linears
from specserve.model.planned_forward import PlannedForward, RunPlan, model_forward
from specserve.model.runner import SequenceSlice

logger = logging.getLogger(__name__)

ModelForward = Callable[[Sequence[SequenceSlice], KvPool], torch.Tensor]
"""Runs a ragged batch over a pool; [R, head rows] logits."""


@runtime_checkable
class RunsWithContext(Protocol):
    """A `ModelForward` that can be asked for more rows of the head than it was cut to."""

    def run_with(
        self, batch: Sequence[SequenceSlice], pool: KvPool, context_ids: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a batch; [R, head rows] logits, and [R, E] those of the ids."""
        ...


_LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Norm of the difference over the norm of the logits; roundings stay far below, mistakes do not."""


@torch.inference_mode()
def optimize_for_cpu(
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    *,
    row_by_row: bool,
    num_threads: int,
    quantization: Quantization,
    block_size: int,
    whole_head: torch.Tensor | None = None,
) -> ModelForward:
    """Lay the model's weights out anew, in place, and return the forward to use from now on.

    Args:
        row_by_row: no row's bits may depend on its neighbours.
        num_threads: threads that the forward may use.
        quantization: of the weights, where the model is compiled.
        block_size: token slots of the KV blocks.
        whole_head: [V, H] weights of the head before it was cut; None where it was not.

    Raises:
        ConfigurationError: the optimised model does not answer like the plain one.
    """
    plain = PlannedForward(model_forward(model), row_by_row=row_by_row)
    if num_threads == 1 and FusedDecoder.fits(model, layers):
        before = _try_out(plain, model, layers)
        compiled = _compile(model, layers, quantization, block_size, whole_head)
        if compiled is not None:
            if quantization == "none":
                _compare(before, _try_out(compiled, model, layers), model)
            return compiled
    return PlannedForward(pack_for_cpu(model, layers), row_by_row=row_by_row)


@torch.inference_mode()
def pack_for_cpu(model: PreTrainedModel, layers: Sequence[LayerShape]) -> RunPlan:
    """Pack the model's weights, in place, and return its forward over planned batches.

    Raises:
        ConfigurationError: the packed model does not answer like the plain one.
    """
    run = model_forward(model)
    if not can_pack(model.dtype):
        logger.info("this processor has no packed kernels for %s", model.dtype)
        return run
    before = _try_out(PlannedForward(run, row_by_row=False), model, layers)
    if FusedDecoder.fits(model, layers):
        run = FusedDecoder(model, layers)
    else:
        pack_linears(model)
    after = _try_out(PlannedForward(run, row_by_row=False), model, layers)
    _compare(before, after, model)
    return run


def _compile(
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    quantization: Quantization,
    block_size: int,
    whole_head: torch.Tensor | None,
) -> ModelForward | None:
    """Compile the whole decoder; None where processor, model, blocks or packages forbid it."""
    if find_spec("numba") is None:
        return None
    from specserve.model.compiled.decoder import CompiledDecoder  # noqa: PLC0415 - may be absent

    if not CompiledDecoder.fits(model, layers, block_size):
        return None
    return CompiledDecoder(model, layers, is_int8=quantization == "int8", whole_head=whole_head)


def _compare(before: torch.Tensor, after: torch.Tensor, model: PreTrainedModel) -> None:
    """Refuse a model whose weights were laid out wrongly.

    Raises:
        ConfigurationError: the logits differ by more than roundings.
    """
    error = float((after - before).norm() / before.norm())
    if not error <= _LARGEST_ERROR[model.dtype]:
        raise ConfigurationError(
            f"{type(model).__name__}: packed weights change the logits by {error:.2g} of their "
            "norm; start with pack_weights off"
        )


def _try_out(
    forward: ModelForward, model: PreTrainedModel, layers: Sequence[LayerShape]
) -> torch.Tensor:
    """Run a few tokens over a pool of their own; [4, head rows] float32 logits."""
    pool = KvPool(layers, 2, 8, model.dtype, model.device)
    vocab_size = model.config.get_text_config().vocab_size
    ids = [(7 + 31 * i) % vocab_size for i in range(12)]
    logits = torch.empty(0)
    for part in (SequenceSlice(ids[:8], 0, (1, 0), 0), SequenceSlice(ids[8:], 8, (1, 0), 4)):
        logits = forward([part], pool)
    return logits.float()
