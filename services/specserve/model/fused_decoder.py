"""The Llama family's forward, written for few rows on a CPU.

A decode step of a small model is a chain of a thousand tiny operations; what they cost is mostly
the calling. This one has half of them: projections of one input are joined or carry their
activation and residual with them, rotary embedding is one multiply-add over queries, keys and
values together, query heads lie so that attention needs no transposed copies. Same arithmetic as
transformers' own classes, up to roundings; checked against them when a model is loaded. Knows no
batch layout and no sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specserve.model.attention import PagedBatch
from specserve.model.kv_pool import LayerShape
from specserve.model.packed_linear import (
    pack_weight,
    packed_product,
    packed_product_with,
    pad_rows,
)
from specserve.model.paged_batch import BatchPlan

_FAMILY = {
    "transformers.models.llama.modeling_llama": "LlamaForCausalLM",
    "transformers.models.mistral.modeling_mistral": "MistralForCausalLM",
    "transformers.models.qwen2.modeling_qwen2": "Qwen2ForCausalLM",
}
"""Classes whose layers are exactly: norm, attention, residual, norm, gated MLP, residual."""


@dataclass(frozen=True, slots=True)
class _Projection:
    """A packed weight with its bias."""

    packed: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer's weights, ready to multiply."""

    attention_norm: torch.Tensor
    """[hidden] float32, times the square root of hidden."""
    query_key_value: _Projection
    """To (g * Hkv query, Hkv key, Hkv value) heads; query head (j, h) shares key head h."""
    output: _Projection
    mlp_norm: torch.Tensor
    """[hidden] float32, times the square root of hidden."""
    gate: _Projection
    up: _Projection
    down: _Projection
    scale: float
    """Factor on attention scores."""
    window: int | None
    """Sliding window in tokens; None for all."""


class FusedDecoder:
    """Runs a whole model: token ids to logits. Takes the model's weights over and frees them."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[LayerShape]) -> None:
        decoder: Any = model.get_decoder()
        self._embedding: torch.Tensor = decoder.embed_tokens.weight  # [V, hidden]
        self._rotary: nn.Module = decoder.rotary_emb
        hidden_size: int = model.config.hidden_size
        self._eps_length = torch.tensor(math.sqrt(model.config.rms_norm_eps * hidden_size))
        self._norm = _norm_weight(decoder.norm)
        self._shape = layers[0]
        self._windows = [layer.window for layer in layers]
        self._num_heads: int = model.config.num_attention_heads
        self._layers: list[_Layer] = []
        for index in range(len(decoder.layers)):
            self._layers.append(self._pack_layer(decoder.layers[index]))
            # Freed layer by layer, so that loading never holds two copies of a model.
            decoder.layers[index] = nn.Identity()
        head: Any = model.get_output_embeddings()
        self._head = _project(head)
        self.head_rows = torch.empty(0)
        """[R, hidden] that the last forward put into the head; there may be more than were wanted.
        """
        model.set_output_embeddings(nn.Identity())

    @staticmethod
    def fits(model: PreTrainedModel, layers: Sequence[LayerShape]) -> bool:
        """Whether the model is of the family, with nothing unusual in its configuration."""
        config = model.config
        return (
            _FAMILY.get(type(model).__module__) == type(model).__name__
            and config.hidden_act == "silu"
            and len({(layer.num_kv_heads, layer.key_dim) for layer in layers}) == 1
            and layers[0].key_dim == layers[0].value_dim
            and model.get_decoder().rotary_emb.inv_freq.numel() * 2 == layers[0].key_dim
        )

    def __call__(self, plan: BatchPlan, paged: PagedBatch) -> torch.Tensor:
        """Run a batch; [R, head rows] logits of the rows wanted."""
        given = nn.functional.embedding(plan.token_ids, self._embedding)  # [T, hidden]
        hidden = pad_rows(given)  # [P, hidden], P >= T
        num_tokens, rows = given.shape[0], hidden.shape[0]
        heads = self._num_heads + 2 * self._shape.num_kv_heads
        dim = self._shape.key_dim
        width = self._num_heads * dim
        cos, sin = self._angles(given, plan.positions)  # [T, heads, D]
        padded = hidden.new_zeros((rows, width))  # [P, Hq * D]; its first rows are written
        mixed = padded.narrow(0, 0, num_tokens)
        for index, layer in enumerate(self._layers):
            normed = self._normalise(hidden, layer.attention_norm)
            joined = _apply(normed, layer.query_key_value)
            if rows != num_tokens:
                joined = joined.narrow(0, 0, num_tokens)
            joined = joined.view(num_tokens, heads, dim)
            turned = torch.addcmul(joined * cos, joined.roll(dim // 2, -1), sin)
            paged.write(index, *turned[:, self._num_heads :].transpose(0, 1).chunk(2))
            query = turned[:, : self._num_heads].flatten(1)  # [T, Hq * D]
            attended = paged.attend_rows(index, query, layer.scale, layer.window)  # [T, Hq * D]
            if rows != num_tokens:
                mixed.copy_(attended)
                attended = padded
            hidden = packed_product_with(
                attended, hidden, layer.output.packed, layer.output.bias, "add"
            )
            normed = self._normalise(hidden, layer.mlp_norm)
            gate = packed_product(normed, layer.gate.packed, layer.gate.bias, "swish")
            inner = packed_product_with(normed, gate, layer.up.packed, layer.up.bias, "mul")
            hidden = packed_product_with(inner, hidden, layer.down.packed, layer.down.bias, "add")
        num_wanted = plan.logit_rows.numel()
        if num_wanted == 0:
            return hidden.new_empty((0, self._head.packed.shape[0]))
        if not plan.all_rows_wanted:
            hidden = pad_rows(hidden.index_select(0, plan.logit_rows))
        self.head_rows = self._normalise(hidden, self._norm)
        return _apply(self.head_rows, self._head)[:num_wanted]

    def _normalise(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Divide each row by its root mean square, and scale it.

        Args:
            rows: [T, hidden].
            weight: [hidden] float32, times the square root of hidden.
        """
        # sqrt(sum + hidden * eps); torch's own rms_norm is a chain of twice as many operations.
        lengths = torch.linalg.vector_norm(rows, 2, -1, True, dtype=torch.float32)  # [T, 1]
        scaled = rows / lengths.hypot_(self._eps_length)  # [T, hidden] float32
        return torch.mul(scaled, weight, out=torch.empty_like(rows))

    def _angles(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [T, heads, D] cosines and signed sines; values are turned by zero."""
        cos, sin = self._rotary(hidden, positions.unsqueeze(0))  # [1, T, D] each
        turned = self._num_heads + self._shape.num_kv_heads
        rows, dim = positions.shape[0], self._shape.key_dim
        all_cos = hidden.new_ones((rows, turned + self._shape.num_kv_heads, dim))
        all_sin = torch.zeros_like(all_cos)
        all_cos[:, :turned] = cos[0].unsqueeze(1)
        all_sin[:, :turned] = sin[0].unsqueeze(1)
        all_sin[:, :turned, : dim // 2].neg_()
        return all_cos, all_sin

    def _pack_layer(self, layer: Any) -> _Layer:
        """Pack one transformers layer."""
        attention, mlp = layer.self_attn, layer.mlp
        dim, width = self._shape.key_dim, self._num_heads * self._shape.key_dim
        # Query head h * g + j moves to j * Hkv + h: heads of one key head become rows, not copies.
        order = (
            torch.arange(width)
            .view(self._shape.num_kv_heads, -1, dim)
            .transpose(0, 1)
            .reshape(width)
        )  # [Hq * D]
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight = torch.cat([p.weight for p in projections])  # [(Hq + 2 Hkv) * D, hidden]
        weight[:width] = weight[:width][order]
        bias = None
        if attention.q_proj.bias is not None:
            bias = torch.cat([p.bias for p in projections])  # [(Hq + 2 Hkv) * D]
            bias[:width] = bias[:width][order]
        return _Layer(
            attention_norm=_norm_weight(layer.input_layernorm),
            query_key_value=_Projection(pack_weight(weight), bias),
            output=_Projection(
                pack_weight(attention.o_proj.weight[:, order]), attention.o_proj.bias
            ),
            mlp_norm=_norm_weight(layer.post_attention_layernorm),
            gate=_project(mlp.gate_proj),
            up=_project(mlp.up_proj),
            down=_project(mlp.down_proj),
            scale=attention.scaling,
            window=self._windows[attention.layer_idx],
        )


def _norm_weight(norm: Any) -> torch.Tensor:
    """Return a norm's weight as `_normalise` wants it: float32, times the root of its length."""
    weight: torch.Tensor = norm.weight.float()
    return weight * math.sqrt(weight.shape[0])


def _project(linear: Any) -> _Projection:
    """Pack an nn.Linear."""
    return _Projection(pack_weight(linear.weight), linear.bias)


def _apply(rows: torch.Tensor, projection: _Projection) -> torch.Tensor:
    """Multiply, and add the bias."""
    return packed_product(rows, projection.packed, projection.bias)
