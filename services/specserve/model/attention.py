"""Attention over the paged KV pool, registered with transformers under `ATTENTION_NAME`.

Any decoder model that takes its attention from transformers' `AttentionInterface` runs on it
unchanged: `model(..., paged_batch=...)` hands the batch to every layer. Keys and values are never
repeated for grouped-query attention; queries that share a key head are rows of one product.
Knows no sampling, no session and no block allocation.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from specserve.errors import ConfigurationError
from specserve.model.kv_pool import KvPool, LayerShape
from specserve.model.paged_batch import MAX_PADDED_TOKENS, BatchPlan, SequenceGroup

ATTENTION_NAME = "specserve_paged"

_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "indexer", "alibi")
"""Arguments of a layer that change the scores in ways this function does not compute."""


class LayerAttention(Protocol):
    """What one layer's attention asks of the batch it runs in."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write key and value, attend; [1, Hq, T, D] queries to [1, T, Hq, Dv]."""
        ...


class PagedBatch:
    """One forward's view of the pool; made per forward and dropped after it."""

    def __init__(self, plan: BatchPlan, pool: KvPool) -> None:
        self.plan = plan
        self._pool = pool
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}
        self._last_written: tuple[torch.Tensor, ...] = ()

    def finite_flag(self) -> torch.Tensor:
        """Say on the device, [], whether the last layer's keys and values are finite: anything bad
        before it reaches them.
        """
        keys, values = self._last_written
        return torch.isfinite(keys).all() & torch.isfinite(values).all()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write key and value, attend; [1, Hq, T, D] queries to [1, T, Hq, Dv]."""
        shape = self._pool.layers[layer]
        rows = query.shape[2]
        self.write(layer, key[0], value[0])
        grouped = query.view(shape.num_kv_heads, -1, rows, shape.key_dim)  # [Hkv, g, T, D]
        flat = grouped.permute(2, 1, 0, 3).reshape(rows, -1)  # [T, g * Hkv * D]
        output = self.attend_rows(layer, flat, scale, window)  # [T, g * Hkv * Dv]
        output = output.view(rows, -1, shape.num_kv_heads, shape.value_dim)
        return output.transpose(1, 2).reshape(1, rows, -1, shape.value_dim)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the new tokens' keys [Hkv, T, Dk] and values [Hkv, T, Dv] to their slots."""
        self._last_written = (keys, values)
        first = self.plan.first_slot
        self._pool.write(layer, self.plan.slots if first is None else first, keys, values)

    def attend_rows(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attend from each new token to its sequence's slots up to its own position.

        Args:
            query: [T, g * Hkv * D]: query head `j` of key head `h` is head `j * Hkv + h`.
            scale: factor on the scores.
            window: most recent positions seen, the token's own included; None for all.

        Returns:
            [T, g * Hkv * Dv], heads in the same order.
        """
        groups = self.plan.groups
        if len(groups) == 1:
            return self._attend_group(0, layer, query, scale, window)
        parts = []
        for number, group in enumerate(groups):
            rows = query.narrow(0, group.first_row, group.num_rows)
            parts.append(self._attend_group(number, layer, rows, scale, window))
        return torch.cat(parts)

    def _attend_group(
        self, number: int, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        group = self.plan.groups[number]
        shape = self._pool.layers[layer]
        heads, dim = shape.num_kv_heads, shape.key_dim
        keys, values = self._read(layer, group)  # [B, Hkv, L, Dk], [B, Hkv, L, Dv]
        if group.query_rows is not None:
            query = query.index_select(0, group.query_rows)
        batch, count = group.num_sequences, group.num_queries
        per_key = query.shape[1] // (heads * dim)
        if count > MAX_PADDED_TOKENS:
            # Many queries of one sequence: key heads are the batch, and one key head serves its
            # query heads by a stride of zero.
            output = scaled_dot_product_attention(
                query.view(count, per_key, heads, dim).permute(2, 1, 0, 3),  # [Hkv, g, n, D]
                keys[0].unsqueeze(1).expand(-1, per_key, -1, -1),
                values[0].unsqueeze(1).expand(-1, per_key, -1, -1),
                attn_mask=self._mask(number, group, 1, window),
                scale=scale,
            )  # [Hkv, g, n, Dv]
            return output.permute(2, 1, 0, 3).reshape(count, -1)
        output = scaled_dot_product_attention(
            query.reshape(batch, count * per_key, heads, dim).transpose(1, 2),
            keys,
            values,
            attn_mask=self._mask(number, group, per_key, window),
            scale=scale,
        )  # [B, Hkv, n * g, Dv]
        output = output.transpose(1, 2).reshape(batch * count, -1)
        if group.output_rows is not None:
            output = output.index_select(0, group.output_rows)
        return output

    def _read(self, layer: int, group: SequenceGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the group's keys [B, Hkv, L, Dk] and values [B, Hkv, L, Dv]."""
        if group.block_ids is None:
            return self._pool.slice(layer, group.first_slot or 0, group.num_keys)
        keys, values = self._pool.gather(layer, group.block_ids, group.num_sequences)
        if group.num_sequences == 1:
            keys, values = keys[:, :, : group.num_keys], values[:, :, : group.num_keys]
        return keys, values

    def _mask(
        self, number: int, group: SequenceGroup, repeats: int, window: int | None
    ) -> torch.Tensor | None:
        """Return the additive mask [B, 1, n * repeats, L], or None if all see all."""
        if not group.is_masked and (window is None or window >= group.num_keys):
            return None
        mask = self._masks.get((number, repeats, window or 0))
        if mask is None:
            positions = group.positions[:, :, None]  # [B, n, 1]
            keys = torch.arange(group.num_keys, device=positions.device)  # [L]
            hidden = keys > positions  # [B, n, L]
            if window is not None:
                hidden |= keys <= positions - window
            mask = torch.zeros(hidden.shape, dtype=self._pool.dtype, device=positions.device)
            mask = mask.masked_fill_(hidden, float("-inf"))
            if repeats > 1 and group.num_queries > 1:
                mask = mask.repeat_interleave(repeats, dim=1)  # [B, n * g, L]
            mask = mask.unsqueeze(1)
            self._masks[number, repeats, window or 0] = mask
        return mask


class ShapeProbe:
    """Stands in for a batch while a model is loaded, and records what each layer keeps."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Record the shapes; answer zeros.

        Raises:
            ConfigurationError: a layer attends twice: what it kept first would be lost.
        """
        if layer in self.shapes:
            raise ConfigurationError(f"layer {layer} attends more than once in a forward")
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], window)
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    paged_batch: LayerAttention | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Serve one layer's attention; the signature is transformers' own.

    Raises:
        ConfigurationError: the layer wants something that is not computed here.
    """
    layer = getattr(module, "layer_idx", None)
    if paged_batch is None or not isinstance(layer, int):
        raise ConfigurationError(
            f"{type(module).__name__} does not hand the paged batch to its attention"
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigurationError(f"{type(module).__name__} is not causal; only decoders are served")
    if attention_mask is not None:
        # transformers builds none for this attention: it is the layer's own.
        raise ConfigurationError(
            f"{type(module).__name__} masks in a way of its own, which is not computed here"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigurationError(
                f"{type(module).__name__} uses {name}, which the paged attention does not compute"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return paged_batch.attend(layer, query, key, value, scale, sliding_window), None


# No mask function is registered: transformers then builds no mask. The batch knows who sees whom.
AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
