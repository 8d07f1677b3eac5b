"""The student: a few of the target's layers under its frozen embedding, run on packed rows.

Knows Hugging Face decoder models; knows no text file and no training loop.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from specserve.errors import ConfigurationError, ModelUnavailable

PACKED_ATTENTION = "specserve_packed_rows"


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Several token rows laid end to end."""

    token_ids: Tensor
    """[T] all rows' ids."""
    position_ids: Tensor
    """[T] position of each token in its own row."""
    row_ids: Tensor
    """[T] which row each token belongs to."""

    def to(self, device: torch.device) -> "PackedRows":
        """Return a copy on a device."""
        return PackedRows(
            self.token_ids.to(device), self.position_ids.to(device), self.row_ids.to(device)
        )

    @property
    def slots(self) -> Tensor:
        """Return [T] the place of each token in a [rows * longest] padded layout."""
        return self.row_ids * self.longest + self.position_ids

    @property
    def longest(self) -> int:
        """Return the length of the longest row."""
        return int(self.position_ids.max()) + 1

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return int(self.row_ids.max()) + 1


def pack_rows(rows: list[Tensor]) -> PackedRows:
    """Lay rows of token ids end to end."""
    return PackedRows(
        token_ids=torch.cat(rows),
        position_ids=torch.cat([torch.arange(len(row)) for row in rows]),
        row_ids=torch.cat([torch.full((len(row),), i) for i, row in enumerate(rows)]),
    )


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedRows | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend causally inside each row: the block-diagonal mask, without building it."""
    if packed is None:
        raise TypeError("packed attention is for hidden_states(), which passes packed=")
    slots, rows, longest = packed.slots, packed.num_rows, packed.longest

    def padded(states: Tensor) -> Tensor:  # [1, heads, T, d] -> [rows, heads, longest, d]
        flat = states[0].transpose(0, 1)
        empty = flat.new_zeros(rows * longest, *flat.shape[1:])
        full = empty.index_copy(0, slots, flat).view(rows, longest, *flat.shape[1:])
        return full.transpose(1, 2)

    groups = query.shape[1] // key.shape[1]
    mixed = nn.functional.scaled_dot_product_attention(
        padded(query),
        padded(key).repeat_interleave(groups, 1),
        padded(value).repeat_interleave(groups, 1),
        is_causal=True,
        scale=scaling,
    )
    flat = mixed.transpose(1, 2).reshape(rows * longest, *mixed.shape[1::2])
    return flat.index_select(0, slots)[None], None


def _no_mask(*_: object, **__: object) -> None:
    """Build no mask: the attention function keeps rows apart itself."""


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)


def init_student(target: LlamaForCausalLM, layers: tuple[int, ...]) -> LlamaForCausalLM:
    """Build a float32 student from named target layers; its embedding is frozen.

    Embedding, output head and final norm are the target's too.
    """
    wanted = target.config.to_dict() | {"num_hidden_layers": len(layers), "dtype": "float32"}
    wanted.pop("layer_types", None)
    config = LlamaConfig.from_dict(wanted)
    config._attn_implementation = PACKED_ATTENTION
    student = LlamaForCausalLM(config)
    source, state = target.state_dict(), {}
    for name in student.state_dict():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            parts[2] = str(layers[int(parts[2])])
        state[name] = source[".".join(parts)].float()
    student.load_state_dict(state)
    student.model.embed_tokens.weight.requires_grad_(False)
    student.lm_head.weight.requires_grad_(False)
    return student


def load_student(draft: Path, target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Load a draft that was distilled before, in float32, to train it on.

    An embedding that is the target's stays frozen, as it was; another one is trained.

    Raises:
        ModelUnavailable: it is missing, or not of the Llama architecture.
        ConfigurationError: it has another vocabulary than the target.
    """
    if not (draft / "config.json").is_file():
        raise ModelUnavailable(f"{draft / 'config.json'} is missing")
    kind = AutoConfig.from_pretrained(draft).model_type
    if kind != "llama":
        raise ConfigurationError(f"{draft} is a {kind} model; a draft that was distilled is llama")
    student = LlamaForCausalLM.from_pretrained(
        draft, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
    )
    embedding, targets = student.model.embed_tokens.weight, target.model.embed_tokens.weight
    if len(embedding) != len(targets):
        raise ConfigurationError(
            f"{draft} has {len(embedding)} token ids, its target {len(targets)}"
        )
    if embedding.shape == targets.shape and torch.equal(embedding.bfloat16(), targets.bfloat16()):
        embedding.requires_grad_(False)
        student.lm_head.weight.requires_grad_(False)
    return student


@dataclass(frozen=True, slots=True)
class ScratchShape:
    """A small student of its own, with its own embedding."""

    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width; a multiple of the head's width."""


def scratch_student(target: LlamaForCausalLM, shape: ScratchShape, seed: int) -> LlamaForCausalLM:
    """Build a float32 student with random weights, its embedding trained and tied to its head.

    Heads are as wide as the target's, and as many queries share a key.

    Raises:
        ConfigurationError: the width is no multiple of a head's.
    """
    source = target.config
    head_dim = source.head_dim or source.hidden_size // source.num_attention_heads
    key_heads = source.num_key_value_heads or source.num_attention_heads
    width = head_dim * (source.num_attention_heads // key_heads)
    if shape.num_layers < 1 or shape.hidden_size < 1 or shape.hidden_size % width:
        raise ConfigurationError(
            f"a student of {shape.num_layers} layers, hidden size {shape.hidden_size}: at least "
            f"one layer and a multiple of {width} are wanted"
        )
    wanted = source.to_dict() | {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.hidden_size * 8 // 3,
        "num_attention_heads": shape.hidden_size // head_dim,
        "num_key_value_heads": shape.hidden_size // width,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    wanted.pop("layer_types", None)
    config = LlamaConfig.from_dict(wanted)
    config._attn_implementation = PACKED_ATTENTION
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def hidden_states(student: LlamaForCausalLM, packed: PackedRows) -> Tensor:
    """Return [T, H] final hidden states of packed rows."""
    output = student.model(
        input_ids=packed.token_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        packed=packed,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden
