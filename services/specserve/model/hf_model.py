"""Load a Hugging Face model and see that it can be served.

It must be a decoder whose whole state is keys and values by position. A rejected draft is rolled
back by forgetting a length; a model with any other state (recurrent layers, an encoder, chunked
masks) would be wrong afterwards without a sign. Such models are refused here, in words. Knows
configurations and shapes; knows no pool and no batch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError, ModelUnavailable
from specserve.model.attention import ATTENTION_NAME, ShapeProbe
from specserve.model.dummy_weights import dummy_model
from specserve.model.kv_pool import LayerShape

logger = logging.getLogger(__name__)

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_GROWING_ROPE_TYPES = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that change for every token once a sequence passes the trained length."""


def load_model(
    config: EngineConfig, model_dir: Path, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Load a directory's model with the paged attention in every layer.

    Raises:
        ModelUnavailable: files are missing or damaged.
        ConfigurationError: the model cannot be served.
    """
    try:
        model_config = AutoConfig.from_pretrained(
            model_dir, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise _refusal(config, error) from error
    check_model_config(config.model, model_config)
    try:
        model: PreTrainedModel
        if config.load_format == "dummy":
            model = dummy_model(model_config, dtype, device, ATTENTION_NAME)
        else:
            with _no_progress_bar():
                model = AutoModelForCausalLM.from_pretrained(
                    model_dir,
                    config=model_config,
                    dtype=dtype,
                    attn_implementation=ATTENTION_NAME,
                    use_safetensors=True,
                    trust_remote_code=config.trust_remote_code,
                )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise _refusal(config, error) from error
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ConfigurationError(f"{config.model}: {type(model).__name__} cannot pick logit rows")
    model.requires_grad_(False)
    model.train(False)
    model.to(device)  # type: ignore[arg-type] # transformers wraps it without its types
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep a second's progress bar out of a service's log."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _refusal(config: EngineConfig, error: Exception) -> ConfigurationError | ModelUnavailable:
    """Say what transformers found wrong, in one line."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "trust_remote_code" in str(error):
        return ConfigurationError(
            f"{config.model} ships its own Python code; read it, then set trust_remote_code"
        )
    if isinstance(error, OSError | SafetensorError):
        return ModelUnavailable(f"{config.model}: {text}")
    return ConfigurationError(f"{config.model} cannot be served: {text}")


def check_model_config(name: str, config: PretrainedConfig) -> None:
    """Refuse a model whose state cannot be cut to a length.

    Raises:
        ConfigurationError: it is not a plain decoder.
    """
    if config.is_encoder_decoder:
        raise ConfigurationError(f"{name} is an encoder-decoder model; only decoders are served")
    text = config.get_text_config()
    types: Sequence[str] = getattr(text, "layer_types", None) or ()
    foreign = sorted(set(types) - _LAYER_TYPES)
    if foreign:
        raise ConfigurationError(
            f"{name} ({text.model_type}) has {', '.join(foreign)} layers: their state cannot be "
            "rolled back to a length, which every rejected draft token needs"
        )


def longest_context(config: PretrainedConfig) -> int | None:
    """Return the longest sequence that is computed alike beside any neighbour; None if unknown."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(v, Mapping) for v in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") in _GROWING_ROPE_TYPES:
            trained = kind.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            if isinstance(trained, int) and trained < limit:
                # Beyond it the longest sequence of a batch would bend everyone's positions.
                logger.warning(
                    "context held to %d of %d tokens: rope type %s depends on the batch beyond",
                    trained,
                    limit,
                    kind["rope_type"],
                )
                limit = trained
    return limit


@torch.inference_mode()
def probe_layers(name: str, model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Run one token and learn what each layer keeps.

    Raises:
        ConfigurationError: some layer keeps its state elsewhere, or masks in a way not told.
    """
    probe = ShapeProbe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False, paged_batch=probe)
    text = model.config.get_text_config()
    wanted = text.num_hidden_layers
    if sorted(probe.shapes) != list(range(wanted)):
        raise ConfigurationError(
            f"{name} ({text.model_type}): {len(probe.shapes)} of {wanted} layers attend through "
            "the paged KV pool; the others hold state that cannot be rolled back to a length"
        )
    types: Sequence[str] = getattr(text, "layer_types", None) or ()
    for layer, kind in enumerate(types):
        if kind == "sliding_attention" and probe.shapes[layer].window is None:
            raise ConfigurationError(
                f"{name} ({text.model_type}): layer {layer} does not tell its attention the window"
            )
    shapes = tuple(probe.shapes[layer] for layer in range(wanted))
    window = getattr(text, "sliding_window", None)
    context = longest_context(model.config)
    is_short = isinstance(window, int) and (context is None or window < context)
    if not types and is_short and all(shape.window is None for shape in shapes):
        raise ConfigurationError(
            f"{name} ({text.model_type}): no layer tells its attention the window of {window}"
        )
    return shapes
