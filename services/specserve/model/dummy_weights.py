"""A model of a given shape with random weights, made where it will run: nothing is read or copied.

Each tensor depends on its name and shape alone, so two models share the weights they have in
common: a draft that is its target without the last layers agrees with it in part. Knows shapes;
knows no files.
"""

from __future__ import annotations

import logging
import zlib

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_DEFAULT_SCALE = 0.02
"""Standard deviation of the weights where the configuration names none (`initializer_range`)."""


@torch.no_grad()
def dummy_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    """Make a model whose matrices are normal, biases zero and norms one.

    Args:
        attention: name of the attention implementation.
    """
    logger.warning("load_format dummy: random weights, whose text means nothing")
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    scale = float(getattr(config.get_text_config(), "initializer_range", _DEFAULT_SCALE))
    generator = torch.Generator(device)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator.manual_seed(zlib.crc32(f"{name} {tuple(parameter.shape)}".encode()))
        parameter.normal_(0.0, scale, generator=generator)
    return model
