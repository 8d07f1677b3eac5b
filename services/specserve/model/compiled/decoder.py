"""A whole Llama-family decoder as one compiled call: token ids in, logits out.

A decode step of a small model is a thousand tiny operations, and what they cost in a framework is
the calling; here they are one function, and reading the weights is what is left. Its rows never
influence one another, so speculation, batching and prefix caching change no bit of them. Knows a
model's weights and one batch; knows no session and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from specserve.model.compiled.assembly import LANES, MAX_ROWS
from specserve.model.compiled.attention_assembly import MAX_VECTORS
from specserve.model.compiled.forward import run
from specserve.model.compiled.guess import guess
from specserve.model.compiled.kernels import (
    PanelStore,
    compile_kernels,
    padded_outputs,
    processor_has_kernels,
)
from specserve.model.hf_model import longest_context
from specserve.model.kv_pool import KvPool, LayerShape
from specserve.model.runner import NO_IDS, GuessCall, GuessedTokens, SequenceSlice

FloatArray = npt.NDArray[np.float32]

_NO_WINDOW = 1 << 40

_STREAM_FROM_BYTES = 64 << 20
"""Smaller weights may stay in the processor's caches from one step to the next."""


class CompiledDecoder:
    """Runs a whole model. Takes the model's weights over and frees them layer by layer."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerShape],
        *,
        is_int8: bool = False,
        whole_head: torch.Tensor | None = None,
    ) -> None:
        """Pack a model that `fits`.

        Args:
            whole_head: [V, H] weights of the head before it was cut; None where it was not.
            is_int8: round the weights to int8, for a draft: half of what a step reads.
        """
        config = model.config
        decoder: Any = model.get_decoder()
        self._shape = layers[0]
        self._num_heads: int = config.num_attention_heads
        self._hidden_size: int = config.hidden_size
        self._inner_size: int = config.intermediate_size
        self._eps = np.float32(config.rms_norm_eps)
        self._scale = np.float32(decoder.layers[0].self_attn.scaling)
        self._rotary: nn.Module = decoder.rotary_emb
        self._config = config
        self._cos, self._sin = self._angles(min(256, longest_context(config) or 256))
        self._windows = np.array([layer.window or _NO_WINDOW for layer in layers], np.int64)
        self._kernels = compile_kernels(self._shape.key_dim)
        # [V, H] bfloat16 as uint16; the tensor keeps the memory.
        self._embedding: torch.Tensor = decoder.embed_tokens.weight.detach()
        self._embedding_bits = self._embedding.view(torch.uint16).numpy()
        self._kept_scratch: dict[int, tuple[Any, ...]] = {}
        head: Any = model.get_output_embeddings()
        self._num_columns: int = head.weight.shape[0]
        self._store = PanelStore(self._num_elements(len(layers)), is_int8=is_int8)
        self._weights = np.zeros((len(layers), 4, 2), np.int64)
        self._norms = np.zeros((len(layers), 2, self._hidden_size), np.float32)
        joined_biases, output_biases = [], []
        for index, layer in enumerate(decoder.layers):
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            for place, linears in enumerate(
                (projections, (attention.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))
            ):
                self._weights[index, place] = self._store.add(
                    torch.cat([linear.weight for linear in linears])
                )
            self._norms[index, 0] = _float32(layer.input_layernorm.weight)
            self._norms[index, 1] = _float32(layer.post_attention_layernorm.weight)
            joined_biases.append(_bias(projections))
            output_biases.append(_bias((attention.o_proj,)))
            decoder.layers[index] = nn.Identity()
        self._biases = (np.stack(joined_biases), np.stack(output_biases))
        self._final_norm = _float32(decoder.norm.weight)
        self._head = np.array(self._store.add(head.weight))
        # Mostly the embedding's memory.
        self._whole_head = head.weight.detach()[:0] if whole_head is None else whole_head
        self._whole_head_bits = self._whole_head.view(torch.uint16).numpy()
        model.set_output_embeddings(nn.Identity())

    @staticmethod
    def fits(model: PreTrainedModel, layers: Sequence[LayerShape], block_size: int) -> bool:
        """Whether processor, model and KV blocks are such as this is written for.

        The model must be one that `fused_decoder` fits, in bfloat16; a block must hold whole pairs
        of positions.
        """
        config = model.config
        return (
            model.dtype == torch.bfloat16
            and layers[0].key_dim % 32 == 0
            and block_size % 2 == 0
            and config.hidden_size % 2 == 0
            and config.intermediate_size % 2 == 0
            and not getattr(config, "mlp_bias", False)
            and processor_has_kernels()
        )

    def __call__(self, batch: Sequence[SequenceSlice], pool: KvPool) -> torch.Tensor:
        """Run a batch and write its keys and values; [R, head rows] float32 logits."""
        return self.run_with(batch, pool, NO_IDS)[0]

    def run_with(
        self, batch: Sequence[SequenceSlice], pool: KvPool, context_ids: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a batch; [R, head rows] logits, and [R, E] those of more ids of the whole head."""
        counts = [len(part.token_ids) for part in batch]
        total = sum(counts)
        longest = max(part.start_position + len(part.token_ids) for part in batch)
        self._reach(longest)
        wanted = [part.num_logit_rows for part in batch]
        num_wanted = sum(wanted)
        logits = np.empty((num_wanted, padded_outputs(self._num_columns)), np.float32)
        context_logits = np.empty((num_wanted, len(context_ids)), np.float32)
        keys, values = pool.stacked()
        run(
            (
                self._matmul(total),
                (self._kernels.score, self._kernels.mix),
                self._matmul(num_wanted),
            ),
            self._weights,
            self._store.element_bytes,
            self._norms,
            self._biases,
            self._eps,
            self._embedding_bits,
            (
                np.array([i for part in batch for i in part.token_ids]),
                np.array([part.start_position for part in batch]),
                np.array(counts),
                np.array(wanted),
                _tables(batch),
            ),
            self._cos,
            self._sin,
            pool.block_size,
            self._windows,
            self._scale,
            keys,
            values,
            self._scratch(total, longest),
            self._head,
            self._final_norm,
            logits,
            self._whole_head_bits,
            context_ids,
            context_logits,
        )
        return torch.from_numpy(logits[:, : self._num_columns]), torch.from_numpy(context_logits)

    def guess_over(self, pool: KvPool, logit_token_ids: torch.Tensor | None) -> GuessCall:
        """Return a call that guesses over a pool; see `Runner.guess`.

        Args:
            logit_token_ids: [V'] id of each column, where the head was cut.
        """
        ids = np.empty(0, np.int64) if logit_token_ids is None else logit_token_ids.numpy()
        return partial(self._guess, pool, ids)

    def _guess(
        self,
        pool: KvPool,
        column_ids: npt.NDArray[np.int64],
        logits: torch.Tensor,
        position: int,
        block_table: Sequence[int],
        num_tokens: int,
        least_confidence: float,
        token_ids: torch.Tensor | None,
        context_ids: npt.NDArray[np.int64],
    ) -> GuessedTokens:
        longest = position + num_tokens
        self._reach(longest)
        keys, values = pool.stacked()
        guessed, confidences = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.float64)
        count = guess(
            logits[0].numpy(),
            column_ids if token_ids is None else token_ids.numpy(),
            column_ids,
            position,
            np.array([block_table]),
            least_confidence,
            (self._matmul(1), (self._kernels.score, self._kernels.mix), self._matmul(1)),
            self._weights,
            self._store.element_bytes,
            self._norms,
            self._biases,
            self._eps,
            self._embedding_bits,
            self._cos,
            self._sin,
            pool.block_size,
            self._windows,
            self._scale,
            keys,
            values,
            self._scratch(1, longest),
            self._head,
            self._final_norm,
            np.empty((1, padded_outputs(self._num_columns)), np.float32),
            self._whole_head_bits,
            context_ids,
            np.empty((1, len(context_ids)), np.float32),
            guessed,
            confidences,
        )
        return GuessedTokens(guessed[:count].tolist(), confidences[:count].tolist())

    def _reach(self, length: int) -> None:
        """Have angles for so many positions."""
        if length > len(self._cos):
            # Some rope types bend all angles for positions beyond the context.
            limit = longest_context(self._config) or 2 * length
            self._cos, self._sin = self._angles(max(length, min(2 * length, limit)))

    def _matmul(self, rows: int) -> npt.NDArray[np.int64]:
        """Choose the loops for so many rows: larger weights than the caches do not pass twice."""
        if self._store.element_bytes == 1:
            return self._kernels.matmul8
        is_read_once = rows <= MAX_ROWS and self._store.num_bytes >= _STREAM_FROM_BYTES
        return self._kernels.stream if is_read_once else self._kernels.matmul

    def _scratch(self, rows: int, longest: int) -> tuple[Any, ...]:
        """Give arrays that one forward works in; those of few rows are kept for the next one."""
        kept = self._kept_scratch.get(rows)
        if kept is not None and kept[-1][0].shape[1] >= longest + LANES:
            return kept
        arrays = self._new_scratch(rows, 2 * longest if rows <= MAX_ROWS else longest)
        if rows <= MAX_ROWS:
            self._kept_scratch[rows] = arrays
        return arrays

    def _new_scratch(self, rows: int, longest: int) -> tuple[Any, ...]:
        dim = self._shape.key_dim
        width = self._num_heads * dim
        joined = width + 2 * self._shape.num_kv_heads * dim
        return (
            np.empty((rows, self._hidden_size), np.uint16),
            np.empty((rows, padded_outputs(joined)), np.float32),
            np.empty((rows, width), np.uint16),
            np.empty((rows, width), np.uint16),
            np.empty((rows, padded_outputs(self._hidden_size)), np.float32),
            np.empty((rows, padded_outputs(2 * self._inner_size)), np.float32),
            np.empty((rows, self._inner_size), np.uint16),
            self._attention_scratch(longest),
        )

    def _attention_scratch(self, longest: int) -> tuple[npt.NDArray[Any], ...]:
        # An odd number of registers: rows that lie apart by a power of two share places in a cache.
        room = (longest // (2 * LANES) + 1) * 2 * LANES + LANES
        return (
            np.empty((MAX_VECTORS, room), np.float32),
            np.empty((MAX_VECTORS, room), np.uint16),
            np.empty((MAX_VECTORS, self._shape.key_dim), np.float32),
            np.empty(MAX_VECTORS, np.float32),
        )

    def _angles(self, length: int) -> tuple[FloatArray, FloatArray]:
        """Return cosines and sines of positions 0 ... length - 1, [length, D / 2] each."""
        with torch.inference_mode():
            cos, sin = self._rotary(torch.zeros(1), torch.arange(length).unsqueeze(0))
        half = self._shape.key_dim // 2
        return (
            np.ascontiguousarray(cos[0, :, :half].float().numpy()),
            np.ascontiguousarray(sin[0, :, :half].float().numpy()),
        )

    def _num_elements(self, num_layers: int) -> int:
        """Count the elements of all packed weights, panels whole."""
        hidden, inner, dim = self._hidden_size, self._inner_size, self._shape.key_dim
        width = self._num_heads * dim
        layer = (
            padded_outputs(width + 2 * self._shape.num_kv_heads * dim) * hidden
            + padded_outputs(hidden) * (width + inner)
            + padded_outputs(2 * inner) * hidden
        )
        return num_layers * layer + padded_outputs(self._num_columns) * hidden


def _tables(batch: Sequence[SequenceSlice]) -> npt.NDArray[np.int64]:
    """Join the block tables, [sequences, blocks]; what a shorter one lacks is 0."""
    if len(batch) == 1:
        return np.array([batch[0].block_table])
    tables = np.zeros((len(batch), max(len(part.block_table) for part in batch)), np.int64)
    for index, part in enumerate(batch):
        tables[index, : len(part.block_table)] = part.block_table
    return tables


def _float32(weight: torch.Tensor) -> FloatArray:
    values: FloatArray = weight.detach().float().numpy()
    return values


def _bias(linears: Sequence[Any]) -> FloatArray:
    """Join the biases of linear layers; empty when they have none."""
    biases = [_float32(linear.bias) for linear in linears if linear.bias is not None]
    return np.concatenate(biases) if biases else np.zeros(0, np.float32)
