"""What `specserve doctor` finds in a pair's files: vocabularies, contexts, memory.

Reads configurations, tokenizers and the headers of weight files; loads no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors import safe_open
from transformers import AutoConfig

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import SpecServeError, VocabularyMismatch
from specserve.model.hf_model import check_model_config, longest_context
from specserve.model.kv_pool import LayerShape, PoolSize, kv_bytes_per_token, size_pool
from specserve.model.loading import resolve_device, resolve_dtype
from specserve.model.model_files import resolve_model_dir, weight_files
from specserve.model.tokenizer import Tokenizer, load_tokenizer
from specserve.model.toy import PREFIX
from specserve.tools.doctor.status import Check, Status
from specserve.tools.terminal import human_bytes


@dataclass(frozen=True, slots=True)
class _Footprint:
    """What one service's model will hold in memory."""

    device: torch.device
    weights_bytes: int
    kv_bytes: int
    pool: PoolSize
    block_size: int
    dtype: str

    @property
    def total_bytes(self) -> int:
        """Weights and KV together."""
        return self.weights_bytes + self.kv_bytes

    def __str__(self) -> str:
        return (
            f"{human_bytes(self.weights_bytes)} weights ({self.dtype}) + "
            f"{human_bytes(self.kv_bytes)} KV ({self.pool.num_blocks} blocks of "
            f"{self.block_size} tokens) on {self.device}"
        )


def examine_models(
    target: EngineConfig, draft: EngineConfig | None, speculative: SpeculativeConfig | None
) -> Iterator[Check]:
    """Check each model by itself, then the pair, then that both fit into memory."""
    engines = {"target": target} | ({"draft": draft} if draft is not None else {})
    tokenizers: dict[str, Tokenizer] = {}
    footprints: dict[str, _Footprint] = {}
    for role, engine in engines.items():
        try:
            tokenizers[role] = load_tokenizer(engine)
            yield Check(role, Status.OK, f"{engine.model} ({_vocabulary(tokenizers[role])})")
            if not engine.model.startswith(PREFIX):
                footprints[role] = _footprint(engine)
                yield Check(f"{role} memory", Status.OK, str(footprints[role]))
                longest = footprints[role].pool.max_model_len
                yield Check(f"{role} context", Status.OK, f"{longest} tokens")
        except SpecServeError as error:
            yield Check(role, Status.PROBLEM, str(error))
    if draft is not None and len(tokenizers) == 2:
        yield _pair(tokenizers["target"], tokenizers["draft"])
    elif speculative is None:
        yield Check("pair", Status.NOTE, "no draft: the target would be served alone")
    elif draft is None:
        yield Check("pair", Status.OK, f"{speculative.method} needs no draft")
    yield from _fits(footprints)


def _vocabulary(tokenizer: Tokenizer) -> str:
    eos = ", ".join(map(str, tokenizer.eos_token_ids)) or "none"
    return f"{tokenizer.vocab_size} tokens, EOS {eos}"


def _pair(target: Tokenizer, draft: Tokenizer) -> Check:
    difference = target.token_table().first_difference(draft.token_table())
    if difference is not None:
        return Check("pair", Status.PROBLEM, str(VocabularyMismatch(*difference)))
    return Check("pair", Status.OK, "every token id means the same to both")


def _footprint(engine: EngineConfig) -> _Footprint:
    folder = resolve_model_dir(engine.model, engine.revision, engine.trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=engine.trust_remote_code)
    check_model_config(engine.model, config)
    device = resolve_device(engine.device)
    dtype = resolve_dtype(engine.dtype, device)
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = [LayerShape(heads, width, width)] * text.num_hidden_layers
    pool = size_pool(engine, layers, longest_context(config), dtype, device)
    kv_bytes = pool.num_blocks * engine.block_size * kv_bytes_per_token(layers, dtype)
    weights = sum(map(_num_elements, weight_files(folder))) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return _Footprint(device, weights, kv_bytes, pool, engine.block_size, name)


def _num_elements(path: Path) -> int:
    count = 0
    with safe_open(path, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            elements = 1
            for size in weights.get_slice(name).get_shape():
                elements *= size
            count += elements
    return count


def _fits(footprints: dict[str, _Footprint]) -> Iterator[Check]:
    """Compare what both services hold with what is free; a GPU's pool is sized to fit by itself."""
    wanted = sum(one.total_bytes for one in footprints.values() if one.device.type == "cpu")
    if not wanted:
        return
    free = psutil.virtual_memory().available
    status = Status.OK if wanted < free else Status.PROBLEM
    yield Check(
        "memory, all models", status, f"{human_bytes(wanted)} wanted, {human_bytes(free)} free"
    )
