"""Tiny random models and a byte tokenizer, made on the spot in Hugging Face's own formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 64

_DECODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.3,
}


def tiny_config(kind: str, **changes: object) -> PretrainedConfig:
    """Return the configuration of a two-layer model of a family."""
    settings = {**_DECODER, **changes}
    match kind:
        case "llama":
            return LlamaConfig(**settings)
        case "qwen2":
            return Qwen2Config(**settings)
        case "qwen3":
            return Qwen3Config(**{"head_dim": 8, **settings})
        case "mistral":
            return MistralConfig(**{"sliding_window": 6, **settings})
        case "gpt2":
            return GPT2Config(
                vocab_size=VOCAB_SIZE,
                n_positions=128,
                n_embd=32,
                n_layer=2,
                n_head=4,
                initializer_range=0.3,
                bos_token_id=0,
                eos_token_id=1,
            )
        case _:
            raise ValueError(kind)


def save_tiny(folder: Path, kind: str, **changes: object) -> Path:
    """Save a random model of a family, float32; the same weights each time."""
    torch.manual_seed(11)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    for name, parameter in model.named_parameters():
        # Norms start at one and biases at zero: neither would show a mistake.
        if "norm" in name or "bias" in name or "ln_" in name:
            torch.nn.init.normal_(parameter.data, 0.5, 0.3)
    model.save_pretrained(folder)
    return folder


def plain_logits(folder: Path, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Run each sequence whole through plain transformers; [n, V] float32 each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([list(ids)])).logits[0] for ids in sequences]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges: two marks, all bytes, two added tokens."""
    vocabulary = {"<s>": 0, "</s>": 1}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [AddedToken(mark, special=True) for mark in ("<s>", "</s>", "<|user|>")]
    )
    inner.add_tokens([AddedToken("  é")])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=(
            "{% for m in messages %}<|user|>{{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<s>{% endif %}"
        ),
    )
