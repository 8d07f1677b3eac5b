"""The toy behind the `Runner` interface: token ids lie where a model's KV would.

Each row's context is *read back from the paged pool through the block table*, so that a wrong
rollback, block table or position gives wrong logits. Knows no session and no scheduler.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import torch

from specserve.config import EngineConfig
from specserve.model.context_ids import HeadColumns
from specserve.model.environment import code_versions, processor_name
from specserve.model.messages import ModelInfo
from specserve.model.runner import GuessCall, SequenceSlice
from specserve.model.toy import ToySpec, toy_logits

DEFAULT_NUM_KV_BLOCKS = 4096
DEFAULT_MAX_MODEL_LEN = 4096
_TABLE_BYTES = 64 << 20
_UNWRITTEN = -1
_FOR_EVER_S = 1e6


class ToyRunner:
    """A toy model with its pool of token ids."""

    guess: GuessCall | None = None
    """Each token takes a step of its own."""

    def __init__(self, spec: ToySpec, config: EngineConfig) -> None:
        num_blocks = config.num_kv_blocks or DEFAULT_NUM_KV_BLOCKS
        self._spec = spec
        self._block_size = config.block_size
        # Slot (block, offset) at block * block_size + offset. A list: numpy scalars are slower.
        self._pool = [_UNWRITTEN] * (num_blocks * config.block_size)
        self._width = min(config.draft_vocab_size or spec.vocab_size, spec.vocab_size)
        self._columns = (
            None if self._width == spec.vocab_size else HeadColumns(torch.arange(self._width))
        )
        self._capacity = max(256, _TABLE_BYTES // (4 * spec.vocab_size))
        self._rows = np.empty((0, spec.vocab_size), dtype=np.float32)
        self._row_of: dict[tuple[int, ...], int] = {}
        # How long a step takes is no part of the model.
        law = replace(spec, step_ms=0.0, row_ms=0.0)
        self._info = ModelInfo(
            model_id=config.model,
            revision="",
            weights_fingerprint=hashlib.sha256(repr(asdict(law)).encode()).hexdigest(),
            vocab_size=spec.vocab_size,
            max_model_len=min(
                config.max_model_len or DEFAULT_MAX_MODEL_LEN, num_blocks * config.block_size
            ),
            dtype="float32",
            device="cpu",
            num_blocks=num_blocks,
            block_size=config.block_size,
            weights_bytes=0,
            kv_cache_bytes=8 * len(self._pool),
            hardware=processor_name(),
            backend="toy",
            versions=code_versions(),
        )

    @staticmethod
    def from_spec(config: EngineConfig) -> ToyRunner:
        """Build the runner that `config.model` (`toy:...`) names."""
        return ToyRunner(ToySpec.parse(config.model), config)

    @property
    def info(self) -> ModelInfo:
        """What was loaded, and the size of the pool."""
        return self._info

    @property
    def logit_token_ids(self) -> torch.Tensor | None:
        """[V'] ids of the logit columns when `draft_vocab_size` cut the head, else None."""
        return None if self._columns is None else self._columns.of(()).token_ids

    @property
    def takes_context_ids(self) -> bool:
        """Whether slices may bring ids that the cut head lacks."""
        return self._columns is not None

    def columns(self, batch: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Return [V'] int64 ascending: token id of each logit column of this batch's forward."""
        return None if self._columns is None else self._columns.of(batch).token_ids

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Write the new tokens to the pool, then look the wanted rows up.

        Returns:
            [sum of num_logit_rows, V'] float32.
        """
        size, pool, order = self._block_size, self._pool, self._spec.order
        rows: list[int] = []
        num_tokens = 0
        if len(self._row_of) > self._capacity:
            self._row_of.clear()
        for item in batch:
            start, table = item.start_position, item.block_table
            end = start + len(item.token_ids)
            num_tokens += end - start
            if self._spec.fatal_token in item.token_ids:
                if (self._spec.fatal_token,) * 2 in pairwise(item.token_ids):
                    time.sleep(_FOR_EVER_S)
                # No Exception: like a fault of a kernel, nothing in the device handles it.
                raise SystemExit(f"token {self._spec.fatal_token} is fatal to this toy")
            for position, token in enumerate(item.token_ids, start):
                pool[table[position // size] * size + position % size] = token
            if item.num_logit_rows:
                first = end - item.num_logit_rows
                oldest = max(0, first - order + 1)
                window = [pool[table[p // size] * size + p % size] for p in range(oldest, end)]
                for position in range(first, end):
                    context = window[max(0, position - order + 1 - oldest) : position + 1 - oldest]
                    rows.append(self._row(tuple(context)))
        if self._spec.step_ms or self._spec.row_ms:
            time.sleep((self._spec.step_ms + self._spec.row_ms * num_tokens) / 1e3)
        whole = torch.from_numpy(self._rows[rows])  # [R, V]
        if self._columns is None:
            return whole
        columns = self._columns.of(batch)
        ids = torch.from_numpy(columns.context_ids)
        return columns.join(whole[:, : self._width], whole[:, ids], batch)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block."""
        size, pool = self._block_size, self._pool
        pool[destination * size : (destination + 1) * size] = pool[
            source * size : (source + 1) * size
        ]

    def _row(self, context: tuple[int, ...]) -> int:
        """Return the index in `_rows` of this context's logits, computing them at first use."""
        index = self._row_of.get(context)
        if index is None:
            if _UNWRITTEN in context:
                raise RuntimeError(f"block table leads to a slot never written: {context}")
            index = len(self._row_of)
            if index == len(self._rows):
                grown = np.empty((max(64, 2 * index), self._spec.vocab_size), dtype=np.float32)
                grown[:index] = self._rows
                self._rows = grown
            self._rows[index] = toy_logits(self._spec, context)
            self._row_of[context] = index
        return index
