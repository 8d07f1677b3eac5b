"""Make a loaded model cheap on a CPU, and see that it still says the same.

Models of the Llama family get a forward of their own (`fused_decoder`); any other keeps its code
and gets packed linear layers. Knows models; knows no session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from specserve.errors import ConfigurationError
from specserve.model.attention import PagedBatch
from specserve.model.fused_decoder import FusedDecoder
from specserve.model.kv_pool import KvPool, LayerShape
from specserve.model.packed_linear import can_pack, pack_linears
from specserve.model.paged_batch import BatchPlan, plan_batch
from specserve.model.runner import SequenceSlice

logger = logging.getLogger(__name__)

ModelForward = Callable[[BatchPlan, PagedBatch], torch.Tensor]
"""Runs a planned batch; [R, head rows] logits."""

_LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Norm of the difference over the norm of the logits; roundings stay far below, mistakes do not."""


def model_forward(model: PreTrainedModel) -> ModelForward:
    """Return the model's own code as a forward over a planned batch."""

    def run(plan: BatchPlan, paged: PagedBatch) -> torch.Tensor:
        rows = plan.logit_rows
        output = model(
            input_ids=plan.token_ids.unsqueeze(0),
            position_ids=plan.positions.unsqueeze(0),
            use_cache=False,
            # No rows at all would leave some kernels without a shape: one is computed and dropped.
            logits_to_keep=rows if rows.numel() else 1,
            paged_batch=paged,
        )
        logits: torch.Tensor = output.logits[0]
        return logits[: rows.numel()]

    return run


@torch.inference_mode()
def optimize_for_cpu(model: PreTrainedModel, layers: Sequence[LayerShape]) -> ModelForward:
    """Pack the model's weights, in place, and return the forward to use from now on.

    Raises:
        ConfigurationError: the packed model does not answer like the plain one.
    """
    forward = model_forward(model)
    if not can_pack(model.dtype):
        logger.info("this processor has no packed kernels for %s", model.dtype)
        return forward
    before = _try_out(forward, model, layers)
    if FusedDecoder.fits(model, layers):
        forward = FusedDecoder(model, layers)
    else:
        pack_linears(model)
    after = _try_out(forward, model, layers)
    error = float((after - before).norm() / before.norm())
    if not error <= _LARGEST_ERROR[model.dtype]:
        raise ConfigurationError(
            f"{type(model).__name__}: packed weights change the logits by {error:.2g} of their "
            "norm; start with pack_weights off"
        )
    return forward


def _try_out(
    forward: ModelForward, model: PreTrainedModel, layers: Sequence[LayerShape]
) -> torch.Tensor:
    """Run a few tokens over a pool of their own; [4, head rows] float32 logits."""
    pool = KvPool(layers, 2, 8, model.dtype, model.device)
    vocab_size = model.config.get_text_config().vocab_size
    ids = [(7 + 31 * i) % vocab_size for i in range(12)]
    logits = torch.empty(0)
    for part in (SequenceSlice(ids[:8], 0, (1, 0), 0), SequenceSlice(ids[8:], 8, (1, 0), 4)):
        plan = plan_batch([part], pool)
        logits = forward(plan, PagedBatch(plan, pool))
    return logits.float()
