"""Any Hugging Face decoder-only model behind the `Runner` protocol.

Feeds flattened tokens, position ids and a paged batch; computes the output head only for the rows
asked for. Knows no session, no scheduler and no sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specserve.config import EngineConfig
from specserve.model.attention import ATTENTION_NAME
from specserve.model.cuda_graphs import GraphCounts, GraphedForward
from specserve.model.environment import code_versions, processor_name
from specserve.model.fused_decoder import FusedDecoder
from specserve.model.hf_model import load_model, longest_context, probe_layers
from specserve.model.huge_pages import collapse_to_huge_pages
from specserve.model.kv_pool import KvPool, size_pool
from specserve.model.lm_head import cut_head, read_draft_vocab
from specserve.model.messages import ModelInfo
from specserve.model.model_files import model_fingerprint
from specserve.model.optimize import ModelForward, optimize_for_cpu
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
    ) -> None:
        self._forward = forward
        self._pool = pool
        self._info = info
        self._logit_token_ids = (
            None
            if logit_token_ids is None
            else torch.tensor(logit_token_ids, dtype=torch.int64, device=pool.device)
        )
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
        cut_head(model, vocab_size, kept)
        layers = probe_layers(config.model, model)
        weights_bytes = _weights_bytes(model)
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
            )
            if weights_bytes >= HUGE_PAGES_FROM_BYTES:
                collapse_to_huge_pages()
        else:
            run = model_forward(model)
            forward = eager = PlannedForward(run, row_by_row=row_by_row)
            if device.type == "cuda" and not config.enforce_eager:
                forward = GraphedForward(run, eager)
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
            backend=_backend(forward, model, config, row_by_row=row_by_row, device=device),
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
        return cls(forward, pool, info, kept)

    @property
    def info(self) -> ModelInfo:
        """What was loaded, and the size of the pool."""
        return self._info

    @property
    def logit_token_ids(self) -> torch.Tensor | None:
        """[V'] int64 ascending: token id of each logit column when the head was cut, else None."""
        return self._logit_token_ids

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run the new tokens of all sequences in one forward and write their KV.

        Returns:
            [sum of num_logit_rows, V'] float32 logits, in batch order.
        """
        logits = self._forward(batch, self._pool)  # [R, head rows]
        return logits[:, : self._num_columns].float()

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
    return ", ".join([*parts, f"attention {ATTENTION_NAME}"])


def _weights_bytes(model: PreTrainedModel) -> int:
    """Count the memory of all weights, tied ones once."""
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
