"""The optimisers of a training run. Knows parameters; knows no model and no loop.

Matrices are moved by Muon (Jordan et al., 2024: momentum made orthogonal by a Newton-Schulz
iteration), scaled so that AdamW's learning rates serve (Liu et al., 2025, arXiv:2502.16982).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specserve.errors import ConfigurationError
from specserve.tools.distill.recipe import TrainConfig


def make_optimisers(
    matrices: Sequence[Tensor], rest: Sequence[Tensor], config: TrainConfig
) -> list[torch.optim.Optimizer]:
    """Return the optimisers, in a fixed order.

    Args:
        matrices: weights between two hidden spaces.
        rest: norms, and an embedding that is trained.

    Raises:
        ConfigurationError: the recipe names an unknown one.
    """
    if config.optimiser == "adamw":
        groups = [
            {"params": list(matrices), "weight_decay": config.weight_decay},
            {"params": list(rest), "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, config.learning_rate, (0.9, 0.95), fused=True)]
    if config.optimiser != "muon":
        raise ConfigurationError(f"optimiser {config.optimiser!r}: muon or adamw is wanted")
    return [
        torch.optim.Muon(
            list(matrices),
            config.learning_rate,
            config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            list(rest), config.learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True
        ),
    ]
