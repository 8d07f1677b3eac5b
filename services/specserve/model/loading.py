"""From a configuration to a loaded model: the factory of runners.

Decides device, number type and threads. Knows no session and no scheduler.
"""

from __future__ import annotations

import platform

import torch

from specserve.config import DType, EngineConfig
from specserve.errors import ConfigurationError
from specserve.model.hf_runner import HuggingFaceRunner
from specserve.model.model_files import resolve_model_dir, weight_files
from specserve.model.runner import Runner
from specserve.model.tokenizer import load_tokenizer
from specserve.model.toy import PREFIX
from specserve.model.toy_runner import ToyRunner


def load_runner(config: EngineConfig) -> Runner:
    """Load the model a configuration names, with its KV pool.

    Raises:
        ModelUnavailable: files are missing, damaged or pickled.
        ConfigurationError: the model, device or number type cannot be served.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if config.model.startswith(PREFIX):
        return ToyRunner.from_spec(config)
    device = resolve_device(config.device)
    prepare_device(device)
    model_dir = resolve_model_dir(config.model, config.revision, config.trust_remote_code)
    if config.load_format == "auto":
        weight_files(model_dir)
    vocab_size = load_tokenizer(config).vocab_size
    dtype = resolve_dtype(config.dtype, device)
    return HuggingFaceRunner.load(config, model_dir, vocab_size, dtype, device)


def resolve_device(device: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device that is there.

    Raises:
        ConfigurationError: it is not there, or of another kind.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device {device!r}: cpu, cuda or cuda:N is wanted") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device {device!r}: cpu, cuda or cuda:N is wanted")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"device {device!r}: {torch.cuda.device_count()} GPUs are here")
    return found


def prepare_device(device: torch.device) -> None:
    """Let this thread work on a device as forwards here need it; call it once, before any."""
    if device.type != "cuda":
        return
    if device.index is not None:
        # Streams and captures belong to the current device, wherever the tensors lie.
        torch.cuda.set_device(device)
    # On sm_90 and sm_100 torch prefers cuDNN where there is a mask. It builds a plan for each exact
    # shape, at 0.2 to 1 s, and here the number of keys changes at every step.
    torch.backends.cuda.enable_cudnn_sdp(False)


def resolve_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """Turn `auto` into bfloat16 where the device computes it, else float32."""
    if dtype != "auto":
        return torch.float32 if dtype == "float32" else torch.bfloat16
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif platform.machine() in ("x86_64", "AMD64"):
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32
