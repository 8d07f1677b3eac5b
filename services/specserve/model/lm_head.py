"""The output head, cut to the rows that are ever wanted.

Two cuts: embedding rows padded beyond the tokenizer's vocabulary never become columns, and a draft
may keep only its frequent tokens (`draft_vocab.json` beside its weights). Knows modules and ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from specserve.errors import ConfigurationError, ModelUnavailable

DRAFT_VOCAB_FILE = "draft_vocab.json"


def read_draft_vocab(model_dir: Path, size: int | None, vocab_size: int) -> tuple[int, ...] | None:
    """Read the ids a draft's head keeps, ascending; None when the whole vocabulary is kept.

    The file is `{"token_ids": [...]}`, most frequent first.

    Args:
        size: keep this many of the most frequent; None keeps the file's list as it is.

    Raises:
        ConfigurationError: a size is asked for and the model ships no list, or a shorter one.
        ModelUnavailable: the file is damaged.
    """
    path = model_dir / DRAFT_VOCAB_FILE
    if not path.is_file():
        if size is not None and size < vocab_size:
            raise ConfigurationError(f"draft_vocab_size {size}: {model_dir} has no {path.name}")
        return None
    try:
        ids = json.loads(path.read_text())["token_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(f"{path} is damaged: {error}") from error
    if not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise ModelUnavailable(f"{path}: ids must lie in 0..{vocab_size - 1}, and be some")
    if len(set(ids)) != len(ids):
        raise ModelUnavailable(f"{path} names an id twice")
    if size is not None:
        if size >= vocab_size:
            return None
        if size > len(ids):
            raise ConfigurationError(f"draft_vocab_size {size}: {path} lists {len(ids)} ids")
        ids = ids[:size]
    return tuple(sorted(ids))


def whole_head_of(model: PreTrainedModel) -> torch.Tensor | None:
    """Return [V, H] weights of a head that its rows can be taken from one by one.

    None where a logit is more than a product with a row of it.
    """
    head = model.get_output_embeddings()
    is_plain = type(head) is nn.Linear and head.bias is None
    scaled = ("logit_scale", "final_logit_softcapping", "logits_scaling")
    text = model.config.get_text_config()
    if not is_plain or any(getattr(text, name, None) not in (None, 1, 1.0) for name in scaled):
        return None
    weight: torch.Tensor = head.weight.detach()
    return weight


def cut_head(model: PreTrainedModel, vocab_size: int, token_ids: Sequence[int] | None) -> None:
    """Keep the head's rows of token_ids, or its first vocab_size rows when None.

    Raises:
        ConfigurationError: the matrix is smaller than the vocabulary, or there is no plain head.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigurationError(f"{type(model).__name__} has no linear output head")
    rows = head.out_features
    if rows < vocab_size:
        raise ConfigurationError(f"the tokenizer has {vocab_size} tokens, the model {rows} rows")
    if token_ids is None and rows == vocab_size:
        return
    if type(head) is not nn.Linear:
        raise ConfigurationError(f"{type(head).__name__} is no plain linear head and cannot be cut")
    # A slice is a view: a tied embedding keeps its memory.
    kept: slice | torch.Tensor = slice(vocab_size)
    if token_ids is not None:
        kept = torch.tensor(token_ids, device=head.weight.device)
    tensors = {name: tensor.detach()[kept] for name, tensor in head.named_parameters()}
    size = tensors["weight"].shape[0]
    cut = nn.Linear(head.in_features, size, bias="bias" in tensors, device="meta")
    for name, tensor in tensors.items():
        setattr(cut, name, nn.Parameter(tensor, requires_grad=False))
    model.set_output_embeddings(cut)
