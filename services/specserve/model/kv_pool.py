"""The KV pool: keys and values by layer, head and token slot; slots grouped in fixed blocks.

Knows shapes, memory and device; knows no session, no block allocation and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError
from specserve.model.huge_pages import prefer_huge_pages

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
        """Elements per token, keys and values together."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def kv_bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Count the bytes that one token takes in the pool, all layers together."""
    return sum(layer.row_size for layer in layers) * dtype.itemsize


class KvPool:
    """Keys and values of `num_blocks * block_size` token slots, for every layer.

    A head's slots lie side by side, so that reading a sequence is reading straight on: on a CPU
    that halves the time of attention over a long cache. One block more than asked is allocated: it
    stays zero and pads short block tables, so that a gather over sequences of different lengths
    never reads what another session left behind.
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
        self._all_keys: torch.Tensor | None = None
        self._all_values: torch.Tensor | None = None
        self._stacked: tuple[NDArray[np.uint16], NDArray[np.uint16]] | None = None
        first = layers[0]
        if all(x.row_size == first.row_size and x.key_dim == first.key_dim for x in layers):
            self._all_keys = self._allocate(len(layers), first.num_kv_heads, first.key_dim)
            self._all_values = self._allocate(len(layers), first.num_kv_heads, first.value_dim)
            self._keys = list(self._all_keys)
            self._values = list(self._all_values)
        else:
            self._keys = [self._allocate(1, x.num_kv_heads, x.key_dim)[0] for x in layers]
            self._values = [self._allocate(1, x.num_kv_heads, x.value_dim)[0] for x in layers]

    def _allocate(self, num_layers: int, num_heads: int, dim: int) -> torch.Tensor:
        """Make zeroed [L, Hkv, S, D] keys or values."""
        shape = (num_layers, num_heads, (self.num_blocks + 1) * self.block_size, dim)
        made = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if self.device.type == "cpu":
            prefer_huge_pages(made.data_ptr(), made.nbytes)
        return made

    @property
    def padding_block(self) -> int:
        """Id of the block that is always zero."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        """Memory of the blocks that sessions can hold."""
        return self.num_blocks * self.block_size * kv_bytes_per_token(self.layers, self.dtype)

    def stacked(self) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        """View all layers' keys and values as [L, Hkv, S, D] bit patterns of bfloat16.

        A block's elements of one head lie side by side; who uses this view instead of `write` and
        `gather` may order them within the block as it likes.

        Raises:
            ValueError: layers differ in shape, or hold another number type.
        """
        if self._stacked is None:
            keys, values = self._all_keys, self._all_values
            if keys is None or values is None or self.dtype != torch.bfloat16:
                raise ValueError(f"the pool is not one stack of bfloat16 layers but {self.dtype}")
            self._stacked = keys.view(torch.uint16).numpy(), values.view(torch.uint16).numpy()
        return self._stacked

    def write(
        self, layer: int, slots: int | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store the keys [Hkv, T, Dk] and values [Hkv, T, Dv] of T tokens.

        Args:
            slots: [T] int64, or the first of T consecutive slots.
        """
        for pool, new in ((self._keys[layer], keys), (self._values[layer], values)):
            if isinstance(slots, int):
                pool.narrow(1, slots, new.shape[1]).copy_(new)
            else:
                pool.index_copy_(1, slots, new)

    def slice(self, layer: int, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View consecutive slots as keys [1, Hkv, L, Dk] and values [1, Hkv, L, Dv]."""
        keys, values = self._keys[layer], self._values[layer]
        return (
            keys.narrow(1, start, length).unsqueeze(0),
            values.narrow(1, start, length).unsqueeze(0),
        )

    def gather(
        self, layer: int, block_ids: torch.Tensor, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out whole blocks as keys [B, Hkv, L, Dk] and values [B, Hkv, L, Dv].

        Args:
            block_ids: [B * blocks] int64, each sequence's blocks after the other's.
        """
        keys, values = (
            pool.view(pool.shape[0], -1, self.block_size * pool.shape[2])
            .index_select(1, block_ids)
            .view(pool.shape[0], num_sequences, -1, pool.shape[2])
            .transpose(0, 1)
            for pool in (self._keys[layer], self._values[layer])
        )
        return keys, values

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block, all layers."""
        size = self.block_size
        pools = (*self._keys, *self._values)
        if self._all_keys is not None and self._all_values is not None:
            pools = (self._all_keys, self._all_values)  # two copies, not two a layer
        for pool in pools:
            kept = pool.narrow(-2, source * size, size)
            pool.narrow(-2, destination * size, size).copy_(kept)

    def clear_slots(self, slots: torch.Tensor) -> None:
        """Zero the given slots, [N] int64, in every layer."""
        for pool in (*self._keys, *self._values):
            pool.index_fill_(1, slots, 0.0)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many blocks, and the longest sequence that they and the model allow."""

    num_blocks: int
    max_model_len: int


def kv_room_bytes(*, free: int, total: int, reserved: int, utilization: float) -> int:
    """Return how much of a GPU's memory a process may take for its KV pool, 0 for none.

    That is its own share of the GPU, less what it holds and what activations need, as far as it is
    free. What other processes hold only counts where it leaves less than that.

    Args:
        free: bytes that no process holds.
        total: bytes of the GPU.
        reserved: bytes that this process holds, its weights above all.
        utilization: this process's share of the GPU, in (0, 1].
    """
    return max(0, min(free, int(utilization * total) - reserved) - _ACTIVATION_BYTES)


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
        torch.cuda.empty_cache()  # loading leaves some behind, such as the rows of a cut head
        free, total = torch.cuda.mem_get_info(device)
        num_blocks = (
            kv_room_bytes(
                free=free,
                total=total,
                reserved=torch.cuda.memory_reserved(device),
                utilization=config.gpu_memory_utilization,
            )
            // block_bytes
        )
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
