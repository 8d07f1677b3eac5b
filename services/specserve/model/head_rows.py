"""What a forward in torch puts into its head, kept for the ids that the head was cut of.

Knows modules; knows no batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from specserve.model.fused_decoder import FusedDecoder
from specserve.model.planned_forward import PlannedForward

HeadRows = Callable[[], torch.Tensor]
"""Returns [R, H] of the last forward, one row for each row of its logits or more."""


def head_rows(forward: object, model: PreTrainedModel) -> HeadRows | None:
    """Keep the head's input from now on; None for a forward that does not show it."""
    if not isinstance(forward, PlannedForward):
        return None
    if isinstance(forward.run, FusedDecoder):
        decoder = forward.run
        return lambda: decoder.head_rows
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        return None
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        kept[:] = inputs[:1]

    head.register_forward_pre_hook(keep)
    return lambda: kept[0].flatten(0, -2)
