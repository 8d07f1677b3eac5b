"""The KV pool: one row per token slot and layer, grouped in fixed blocks.

Knows shapes, memory and device; knows no session, no block allocation and no model. A layer's row
holds its keys, then its values, so that one gather reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError

CPU_KV_BYTES = 1 << 29
"""KV pool on a CPU when no size is asked for."""

_ACTIVATION_BYTES = 1 << 30
"""Device memory left free for activations and the allocator (CUDA)."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps per token."""

    num_kv_heads: int
    key_dim: int
    """Elements per head of a key."""
    value_dim: int
    """Elements per head of a value."""
    window: int | None = None
    """Most recent tokens that the layer sees, the current one included; None for all."""

    @property
    def row_size(self) -> int:
        """Elements per token: all keys, then all values."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View [B, L, W] rows as keys [B, Hkv, L, Dk] and values [B, Hkv, L, Dv]."""
        batch, length, _ = rows.shape
        keys, values = rows.tensor_split((self.num_kv_heads * self.key_dim,), dim=2)
        return (
            keys.view(batch, length, self.num_kv_heads, self.key_dim).transpose(1, 2),
            values.view(batch, length, self.num_kv_heads, self.value_dim).transpose(1, 2),
        )


def kv_bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Count the bytes that one token takes in the pool, all layers together."""
    return sum(layer.row_size for layer in layers) * dtype.itemsize


class KvPool:
    """Keys and values of `num_blocks * block_size` token slots, for every layer.

    One block more than asked is allocated: it stays zero and pads short block tables, so that a
    gather over sequences of different lengths never reads what another session left behind.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        num_slots = (num_blocks + 1) * block_size
        self._rows = [
            torch.zeros((num_slots, layer.row_size), dtype=dtype, device=device)
            for layer in self.layers
        ]  # each [S, W]
        self._blocks = [rows.view(num_blocks + 1, -1) for rows in self._rows]  # each [blocks, W']
        # Made once: a view costs as much to make as a small product.
        self._views = [
            layer.split(rows.unsqueeze(0))
            for layer, rows in zip(self.layers, self._rows, strict=True)
        ]  # each [1, Hkv, S, Dk], [1, Hkv, S, Dv]

    @property
    def padding_block(self) -> int:
        """Id of the block that is always zero."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        """Memory of the blocks that sessions can hold."""
        return self.num_blocks * self.block_size * kv_bytes_per_token(self.layers, self.dtype)

    def rows(self, layer: int) -> torch.Tensor:
        """Return a layer's slots, [S, W]; writing to it writes to the pool."""
        return self._rows[layer]

    def slice(self, layer: int, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View consecutive slots as keys [1, Hkv, L, Dk] and values [1, Hkv, L, Dv]."""
        keys, values = self._views[layer]
        return keys.narrow(2, start, length), values.narrow(2, start, length)

    def gather(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Copy out whole blocks: [N] int64 ids to [N * block_size, W] rows."""
        blocks = self._blocks[layer].index_select(0, block_ids)  # [N, block_size * W]
        return blocks.view(-1, self.layers[layer].row_size)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block, all layers."""
        for blocks in self._blocks:
            blocks[destination].copy_(blocks[source])

    def clear_slots(self, slots: torch.Tensor) -> None:
        """Zero the given slots, [N] int64, in every layer."""
        for rows in self._rows:
            rows.index_fill_(0, slots, 0.0)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many blocks, and the longest sequence that they and the model allow."""

    num_blocks: int
    max_model_len: int


def size_pool(
    config: EngineConfig,
    layers: Sequence[LayerShape],
    model_limit: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> PoolSize:
    """Choose the number of blocks from the flags and the memory at hand.

    Args:
        model_limit: the model's own longest sequence; None when it names none.

    Raises:
        ConfigurationError: what was asked for does not fit.
    """
    wanted = config.max_model_len
    if wanted is not None and model_limit is not None and wanted > model_limit:
        raise ConfigurationError(f"max_model_len {wanted}: the model's context is {model_limit}")
    size = config.block_size
    block_bytes = size * kv_bytes_per_token(layers, dtype)
    num_blocks = config.num_kv_blocks
    if num_blocks is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable = free - int((1 - config.gpu_memory_utilization) * total) - _ACTIVATION_BYTES
        num_blocks = usable // block_bytes
    elif num_blocks is None:
        num_blocks = CPU_KV_BYTES // block_bytes
        if wanted is not None:
            # As many tokens as all sessions can hold, but one full sequence in any case.
            blocks = -(-wanted // size)
            num_blocks = max(blocks + 1, min(num_blocks, blocks * config.max_num_seqs))
    if num_blocks < 2:
        raise ConfigurationError(
            f"no memory for KV: {num_blocks} blocks of {block_bytes} bytes fit, 2 are wanted"
        )
    capacity = num_blocks * size
    if wanted is not None and wanted > capacity:
        raise ConfigurationError(
            f"max_model_len {wanted}: the KV pool holds {capacity} tokens "
            f"({num_blocks} blocks of {size})"
        )
    return PoolSize(num_blocks, wanted or min(model_limit or capacity, capacity))
