"""Model folders without weights: a configuration and a tokenizer, for `--load-format dummy`.

Knows Llama-shaped decoders and where their files go; loads nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    """Standard deviation of the random weights."""
    max_position_embeddings: int = 4096

    def embedding_bytes(self, dtype: str) -> int:
        """Count the bytes of an embedding table that is not also the head."""
        if self.tie_word_embeddings:
            return 0
        return self.vocab_size * self.hidden_size * (2 if dtype == "bfloat16" else 4)

    def cut(self, num_hidden_layers: int) -> Shape:
        """Return the same decoder without its last layers: its dummy weights are the same ones."""
        name = f"{self.name}-{num_hidden_layers}-layers"
        return replace(self, name=name, num_hidden_layers=num_hidden_layers)


TARGET_8B = Shape("llama-8b-shape", 128_256, 4096, 14_336, 32, 32, 8)
"""Llama-3.1-8B."""

DRAFT_1B = Shape("llama-1b-shape", 128_256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True)
"""Llama-3.2-1B."""

SMALL = Shape("small", 16, 256, 512, 4, 8, 2, initializer_range=0.1)
"""Sixteen tokens, so that the law of a few of them can be written down."""

TINY_TARGET = Shape("tiny-target", 1024, 64, 128, 3, 4, 2)
TINY_DRAFT = Shape("tiny-draft", 1024, 32, 64, 1, 4, 2)
TINY_SMALL = Shape("tiny-small", 16, 32, 48, 3, 4, 2, initializer_range=0.3)


def write_model(shape: Shape, parent: Path) -> Path:
    """Write a model's folder under `parent`; returns it."""
    folder = parent / shape.name
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": shape.hidden_size // shape.num_attention_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "initializer_range": shape.initializer_range,
        "max_position_embeddings": shape.max_position_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(shape.vocab_size, folder)
    return folder


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Write a byte-level tokenizer whose words nobody types: prompts are given as ids."""
    marks = ["<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate(marks)}
    vocabulary |= {f"t{number}": number for number in range(len(marks), vocab_size)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    layout = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": vocabulary[mark],
                "content": mark,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for mark in marks
        ],
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
