"""How fast this machine's processors read memory: what a step that reads its weights once takes.

Knows memory and threads; knows no model.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specserve.model.huge_pages import prefer_huge_pages


class MemoryReader:
    """A stretch of memory as large as some weights, read whole by so many threads."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        # Written, so that every page is there; a zero page would be read from the cache.
        memory = torch.empty(-(-num_bytes // 8), dtype=torch.int64)
        prefer_huge_pages(memory.data_ptr(), memory.nbytes)
        memory.fill_(1)
        self._parts = np.array_split(memory.numpy(), num_threads)
        self._threads = ThreadPoolExecutor(num_threads) if num_threads > 1 else None

    def read(self) -> int:
        """Read every byte once; the largest number there."""
        if self._threads is None:
            return int(self._parts[0].max())
        return int(max(self._threads.map(np.max, self._parts)))


def bytes_of_a_step(model: PreTrainedModel) -> int:
    """Count what one step reads of a model's weights: all but an embedding that is no head too."""
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    embedding, head = (layer.weight for layer in layers)
    weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    if embedding.data_ptr() != head.data_ptr():
        del weights[embedding.data_ptr()]
    return sum(weights.values())
