"""Any Hugging Face decoder-only model behind the `Runner` protocol.

Feeds flattened tokens, position ids and a paged batch; computes the output head only for the rows
asked for. Knows no session, no scheduler and no sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specserve.config import EngineConfig
from specserve.model.attention import ATTENTION_NAME
from specserve.model.context_ids import HeadColumns
from specserve.model.cuda_graphs import GraphCounts, GraphedForward
from specserve.model.environment import code_versions, processor_name
from specserve.model.fused_decoder import FusedDecoder
from specserve.model.head_rows import HeadRows, head_rows
from specserve.model.hf_model import load_model, longest_context, probe_layers
from specserve.model.huge_pages import collapse_to_huge_pages
from specserve.model.kv_pool import KvPool, size_pool
from specserve.model.lm_head import cut_head, read_draft_vocab, whole_head_of
from specserve.model.messages import ModelInfo
from specserve.model.model_files import model_fingerprint
from specserve.model.optimize import ModelForward, RunsWithContext, optimize_for_cpu
from specserve.model.packed_linear import JoinedPart, PackedLinear
from specserve.model.planned_forward import PlannedForward, model_forward
from specserve.model.runner import GuessCall, SequenceSlice

logger = logging.getLogger(__name__)


HUGE_PAGES_FROM_BYTES = 64 << 20
"""Smaller models stay in the processor's caches."""


class HuggingFaceRunner:
    """A loaded model with its KV pool."""

    def __init__(
        self,
        forward: ModelForward,
        pool: KvPool,
        info: ModelInfo,
        logit_token_ids: Sequence[int] | None,
        whole_head: torch.Tensor | None = None,
        head_rows: HeadRows | None = None,
    ) -> None:
        """Join what was loaded.

        Args:
            logit_token_ids: [V'] of a cut head.
            whole_head: [V, H] weights of the head before it was cut, where it can be asked for more
                ids than it was cut to.
            head_rows: gives what a forward that is not compiled put into the head.
        """
        self._forward = forward
        self._pool = pool
        self._info = info
        self._logit_token_ids = (
            None
            if logit_token_ids is None
            else torch.tensor(logit_token_ids, dtype=torch.int64, device=pool.device)
        )
        self._columns = (
            None if self._logit_token_ids is None else HeadColumns(self._logit_token_ids)
        )
        self._whole_head = whole_head
        self._head_rows = head_rows
        self._num_columns = len(logit_token_ids) if logit_token_ids else info.vocab_size
        bind = getattr(forward, "guess_over", None)  # of a compiled decoder
        self._guess: GuessCall | None = bind(pool, self._logit_token_ids) if bind else None

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        model_dir: Path,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> HuggingFaceRunner:
        """Load safetensors from a directory and size the pool.

        Args:
            vocab_size: tokens of the tokenizer; rows beyond are padding and never become columns.

        Raises:
            ModelUnavailable: files are missing or damaged.
            ConfigurationError: the model cannot be served exactly, or does not fit.
        """
        is_dummy = config.load_format == "dummy"
        identity = model_fingerprint(
            model_dir, is_dummy=is_dummy, trust_remote_code=config.trust_remote_code
        )
        model = load_model(config, model_dir, dtype, device)
        kept = read_draft_vocab(model_dir, config.draft_vocab_size, vocab_size)
        whole_head = None if kept is None else whole_head_of(model)
        cut_head(model, vocab_size, kept)
        layers = probe_layers(config.model, model)
        weights_bytes = _weights_bytes(model, whole_head)
        # float32 is asked for where tokens must not depend on speculation: with packed weights,
        # rows attended one by one equal plain decoding to the last bit.
        row_by_row = device.type == "cpu" and (config.batch_invariant or dtype == torch.float32)
        forward: ModelForward
        if device.type == "cpu" and config.pack_weights:
            forward = optimize_for_cpu(
                model,
                layers,
                row_by_row=row_by_row,
                num_threads=config.num_threads or torch.get_num_threads(),
                quantization=config.quantization,
                block_size=config.block_size,
                whole_head=whole_head,
            )
            if weights_bytes >= HUGE_PAGES_FROM_BYTES:
                collapse_to_huge_pages()
        else:
            run = model_forward(model)
            forward = eager = PlannedForward(run, row_by_row=row_by_row)
            if device.type == "cuda" and not config.enforce_eager:
                forward = GraphedForward(run, eager)
        rows = None if whole_head is None else head_rows(forward, model)
        if rows is None and not isinstance(forward, RunsWithContext):
            whole_head = None  # CUDA graphs have no place for more columns
        size = size_pool(config, layers, longest_context(model.config), dtype, device)
        pool = KvPool(layers, size.num_blocks, config.block_size, dtype, device)
        info = ModelInfo(
            # A directory's path is this machine's affair; its name is the model's.
            model_id=model_dir.name if Path(config.model).is_dir() else config.model,
            revision=config.revision or "",
            weights_fingerprint=identity,
            vocab_size=vocab_size,
            max_model_len=size.max_model_len,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            num_blocks=size.num_blocks,
            block_size=config.block_size,
            weights_bytes=weights_bytes,
            kv_cache_bytes=pool.num_bytes,
            hardware=(
                torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
            ),
            backend=_backend(
                forward,
                model,
                config,
                row_by_row=row_by_row,
                device=device,
                num_ids=None if kept is None else len(kept),
                takes_context_ids=whole_head is not None,
            ),
            versions=code_versions(),
        )
        logger.info(
            "loaded %s: %.0f MB of weights, %d KV blocks of %d tokens (%.0f MB), context %d",
            config.model,
            weights_bytes / 1e6,
            size.num_blocks,
            config.block_size,
            pool.num_bytes / 1e6,
            size.max_model_len,
        )
        return cls(forward, pool, info, kept, whole_head, rows)

    @property
    def info(self) -> ModelInfo:
        """What was loaded, and the size of the pool."""
        return self._info

    @property
    def logit_token_ids(self) -> torch.Tensor | None:
        """[V'] int64 ascending: token id of each logit column when the head was cut, else None."""
        return self._logit_token_ids

    @property
    def takes_context_ids(self) -> bool:
        """Whether slices may bring ids that the cut head lacks."""
        return self._whole_head is not None

    def columns(self, batch: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Return [V'] int64 ascending: token id of each logit column of this batch's forward."""
        return None if self._columns is None else self._columns.of(batch).token_ids

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run the new tokens of all sequences in one forward and write their KV.

        Returns:
            [sum of num_logit_rows, V'] float32 logits, in batch order.
        """
        columns = None if self._columns is None else self._columns.of(batch)
        if columns is None or not len(columns.context_ids):
            logits = self._forward(batch, self._pool)  # [R, head rows]
            return logits[:, : self._num_columns].float()
        head, context = self._forward_with(batch, columns.context_ids)
        return columns.join(head[:, : self._num_columns].float(), context.float(), batch)

    def _forward_with(
        self, batch: Sequence[SequenceSlice], context_ids: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a batch; [R, head rows] logits, and [R, E] those of more ids."""
        forward: object = self._forward
        if isinstance(forward, RunsWithContext):
            return forward.run_with(batch, self._pool, context_ids)
        if self._whole_head is None or self._head_rows is None:
            raise RuntimeError("this runner takes no ids beyond its head")
        logits = self._forward(batch, self._pool)
        ids = torch.from_numpy(context_ids).to(self._whole_head.device)
        return logits, self._head_rows()[: len(logits)] @ self._whole_head[ids].T

    @property
    def graph_counts(self) -> GraphCounts | None:
        """What was captured as CUDA graphs; None where every forward is meant to be eager."""
        return self._forward.counts if isinstance(self._forward, GraphedForward) else None

    @property
    def guess(self) -> GuessCall | None:
        """Guesses greedily in one call, where the model is compiled."""
        return self._guess

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one KV block, all layers (copy on write of a shared block)."""
        self._pool.copy_block(source, destination)


def _backend(
    forward: ModelForward,
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    row_by_row: bool,
    device: torch.device,
    num_ids: int | None,
    takes_context_ids: bool,
) -> str:
    """Name what computes: the forward, its weights' layout and format, its threads, its attention.

    Two forwards that may differ in the last bits must not have one name.
    """
    parts = [type(forward).__name__]
    if isinstance(forward, PlannedForward):
        is_fused = isinstance(forward.run, FusedDecoder)
        parts = [FusedDecoder.__name__ if is_fused else "transformers"]
    if any(isinstance(module, (PackedLinear, JoinedPart)) for module in model.modules()):
        parts.append("packed linears")
    if config.quantization != "none":
        parts.append(config.quantization)
    if device.type == "cpu":
        parts.append(f"threads {config.num_threads or torch.get_num_threads()}")
    if row_by_row:
        parts.append("row by row")
    if num_ids is not None:
        parts.append(f"head of {num_ids} ids" + takes_context_ids * " and the text's")
    return ", ".join([*parts, f"attention {ATTENTION_NAME}"])


def _weights_bytes(model: PreTrainedModel, whole_head: torch.Tensor | None) -> int:
    """Count the memory of all weights, tied ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    if whole_head is not None:
        tensors.append(whole_head)
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
