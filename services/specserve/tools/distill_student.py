"""The student: a few of the target's layers under its frozen embedding, run on packed rows.

Knows Hugging Face decoder models; knows no text file and no training loop.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

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
