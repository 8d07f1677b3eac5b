"""Turns a llama GGUF file into a plain Hugging Face directory.

Dequantises tensor by tensor and undoes llama.cpp's row order of the query and key projections.
Knows the GGUF layout of the llama architecture with a byte-level BPE tokenizer; knows neither
where files come from nor where they are kept.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig

from specserve.errors import ModelUnavailable

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0..1."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of special tokens."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed access to the metadata of one GGUF file."""

    reader: gguf.GGUFReader
    """The memory-mapped file."""

    def number(self, key: str) -> float:
        """Return one number."""
        return float(self.reader.fields[key].contents())

    def text(self, key: str) -> str:
        """Return one string."""
        return str(self.reader.fields[key].contents())

    def texts(self, key: str) -> list[str]:
        """Return a list of strings; parsed directly, as `contents()` takes seconds for 49,152."""
        field = self.reader.fields[key]
        return [bytes(field.parts[index]).decode("utf-8") for index in field.data]

    def numbers(self, key: str) -> list[int]:
        """Return a list of integers."""
        field = self.reader.fields[key]
        return [int(field.parts[index][0]) for index in field.data]


def hugging_face_name(name: str) -> str:
    """Translate a GGUF tensor name: `blk.0.attn_q.weight` -> `model.layers.0.self_attn...`."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    if part not in _LAYER_NAMES:
        raise ModelUnavailable(f"GGUF import: no llama weight is called {name!r}")
    return f"model.layers.{block}.{_LAYER_NAMES[part]}.{kind}"


def undo_rotary_order(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's interleaving of the two rotary halves of each head's rows."""
    half = weight.shape[0] // num_heads // 2
    pairs = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(reader: _Reader, tied: bool) -> LlamaConfig:
    heads = int(reader.number("llama.attention.head_count"))
    hidden = int(reader.number("llama.embedding_length"))
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=int(reader.number("llama.vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(reader.number("llama.feed_forward_length")),
        num_hidden_layers=int(reader.number("llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(reader.number("llama.attention.head_count_kv")),
        head_dim=hidden // heads,
        max_position_embeddings=int(reader.number("llama.context_length")),
        # The file holds a float32; rounding gives the 1e-05 it was written from.
        rms_norm_eps=float(f"{reader.number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": reader.number("llama.rope.freq_base"),
        },
        tie_word_embeddings=tied,
        bos_token_id=int(reader.number("tokenizer.ggml.bos_token_id")),
        eos_token_id=int(reader.number("tokenizer.ggml.eos_token_id")),
        pad_token_id=int(reader.number("tokenizer.ggml.padding_token_id")),
        dtype="bfloat16",
    )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _write_tokenizer(reader: _Reader, folder: Path) -> None:
    """Write `tokenizer.json`, its configuration and the chat template."""
    pre_tokenizer = reader.text("tokenizer.ggml.pre")
    if pre_tokenizer != "smollm":
        raise ModelUnavailable(f"GGUF import: pre-tokenizer {pre_tokenizer!r}, 'smollm' wanted")
    tokens = reader.texts("tokenizer.ggml.tokens")
    merges = [_pair(merge) for merge in reader.texts("tokenizer.ggml.merges")]
    kinds = reader.numbers("tokenizer.ggml.token_type")
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    # Digits one by one, as the model was trained.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    named = {
        name: tokens[int(reader.number(f"tokenizer.ggml.{key}_token_id"))]
        for name, key in [
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        ]
    }
    settings = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(reader.number("llama.context_length")),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(reader.text("tokenizer.chat_template"))


def _write_weights(reader: _Reader, folder: Path, progress: Progress) -> None:
    heads = {
        "attn_q": int(reader.number("llama.attention.head_count")),
        "attn_k": int(reader.number("llama.attention.head_count_kv")),
    }
    state: dict[str, torch.Tensor] = {}
    for index, tensor in enumerate(reader.reader.tensors):
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(
            np.float32, copy=False
        )
        part = tensor.name.split(".")[-2]
        if part in heads and weight.ndim == 2:
            weight = undo_rotary_order(weight, heads[part])
        values = torch.from_numpy(np.array(weight)).to(torch.bfloat16)  # owns its memory
        state[hugging_face_name(tensor.name)] = values
        progress("converting weights", (index + 1) / len(reader.reader.tensors))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def import_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Write the model and tokenizer of a GGUF file into `folder`, as bfloat16 safetensors.

    Raises:
        ModelUnavailable: the file is not a llama model with a byte-level BPE tokenizer.
    """
    reader = _Reader(gguf.GGUFReader(path))
    architecture = reader.text("general.architecture")
    if architecture != "llama":
        raise ModelUnavailable(f"{path}: architecture {architecture!r}, 'llama' wanted")
    tied = not any(tensor.name == "output.weight" for tensor in reader.reader.tensors)
    config = _config(reader, tied)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    progress("converting tokenizer", 0.0)
    _write_tokenizer(reader, folder)
    _write_weights(reader, folder, progress)
