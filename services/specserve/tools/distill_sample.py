"""Samples training text from the target itself: a user turn, then its own answer.

Needs no data set: the chat template up to the user turn makes the target invent a question.
Knows a Hugging Face model and its tokenizer; knows no student.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from specserve.tools.distill_text import DistillText, Row, load_text, save_text

NUM_TOP_IDS = 16
FILL_LOGPROB = -30.0
_MARK = "\x00user turn\x00"


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """How much is sampled, and how."""

    num_rows: int = 4608
    """Rows in all; even ones are answered greedily, odd ones at temperature 1."""
    rows_per_part: int = 64
    """Rows sampled together and saved as one resumable part."""
    max_user_tokens: int = 96
    """Longest user turn."""
    max_answer_tokens: int = 224
    """Longest answer."""
    user_top_p: float = 0.98
    """Nucleus of the user turn, which is sampled at temperature 1."""
    seed: int = 0
    """Seed of all draws."""


@dataclass(frozen=True, slots=True)
class Template:
    """The chat template cut at the user turn."""

    before_user: list[int]
    """Ids up to the user turn."""
    after_user: list[int]
    """Ids from the end of the user turn to the start of the answer."""
    stop_ids: frozenset[int]
    """Ids that end a turn."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    """One batch of sampled turns."""

    token_ids: list[list[int]]
    """Each row's ids, the stop id included."""
    top_ids: Tensor
    """[rows, steps, k]."""
    top_logprobs: Tensor
    """[rows, steps, k]."""


def read_template(tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int]) -> Template:
    """Cut the tokenizer's chat template around the user's words."""
    text = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
        )
    )
    before, after = text.split(_MARK)
    return Template(
        before_user=list(tokenizer.encode(before, add_special_tokens=False)),
        after_user=list(tokenizer.encode(after, add_special_tokens=False)),
        stop_ids=stop_ids,
    )


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Zero what lies outside the smallest set of mass `top_p`; rows are not renormalised."""
    ordered, order = probs.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return probs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0.0)


def _sample_turn(
    model: PreTrainedModel,
    prompts: list[list[int]],
    greedy: Tensor,
    top_p: float,
    max_tokens: int,
    stop_ids: frozenset[int],
    generator: torch.Generator,
) -> _Sampled:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache = DynamicCache(config=model.config)
    done = [False] * len(prompts)
    sampled: list[list[int]] = [[] for _ in prompts]
    top_ids, top_logprobs = [], []
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    for _ in range(max_tokens):
        # The cache goes by place: its keyword changed between versions of transformers.
        output = model(ids, mask, positions, cache, logits_to_keep=1)
        logprobs = output.logits[:, -1].float().log_softmax(-1)  # [rows, V]
        top = logprobs.topk(NUM_TOP_IDS)
        top_ids.append(top.indices)
        top_logprobs.append(top.values)
        probs = _nucleus(logprobs.exp(), top_p) if top_p < 1 else logprobs.exp()
        drawn = torch.multinomial(probs, 1, generator=generator)[:, 0]
        chosen = torch.where(greedy, top.indices[:, 0], drawn)
        for row, token_id in enumerate(chosen.tolist()):
            if not done[row]:
                sampled[row].append(token_id)
                done[row] = token_id in stop_ids
        if all(done):
            break
        ids = chosen[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        positions = positions[:, -1:] + 1
    return _Sampled(sampled, torch.stack(top_ids, 1), torch.stack(top_logprobs, 1))


@torch.no_grad()
def sample_rows(
    model: PreTrainedModel, template: Template, first: int, count: int, config: SampleConfig
) -> DistillText:
    """Sample rows `first` to `first + count`; the same for the same seed and `first`."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + first)
    users = _sample_turn(
        model,
        [template.before_user] * count,
        torch.zeros(count, dtype=torch.bool),
        config.user_top_p,
        config.max_user_tokens,
        template.stop_ids,
        generator,
    )
    prompts = [
        template.before_user
        + [token_id for token_id in turn if token_id not in template.stop_ids]
        + template.after_user
        for turn in users.token_ids
    ]
    answers = _sample_turn(
        model,
        prompts,
        torch.arange(first, first + count) % 2 == 0,
        1.0,
        config.max_answer_tokens,
        template.stop_ids,
        generator,
    )
    rows = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers.token_ids, strict=True)):
        rows.append(
            Row(
                prompt=np.array(prompt, np.int64),
                answer=np.array(answer, np.int64),
                top_ids=answers.top_ids[number, : len(answer)].numpy(),
                top_logprobs=answers.top_logprobs[number, : len(answer)]
                .clamp_min(FILL_LOGPROB)
                .numpy(),
            )
        )
    return DistillText(tuple(rows))


def sample_text(
    model: PreTrainedModel,
    template: Template,
    path: Path,
    config: SampleConfig,
    progress: Callable[[str], None],
) -> DistillText:
    """Sample all rows into `path`; parts already sampled beside it are used again."""
    parts_folder = path.with_name(path.name + ".parts")
    parts_folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for first in range(0, config.num_rows, config.rows_per_part):
        count = min(config.rows_per_part, config.num_rows - first)
        part = parts_folder / f"seed{config.seed}-row{first:07d}-{count}.npz"
        if not part.exists():
            save_text(part, sample_rows(model, template, first, count, config))
        rows.extend(load_text(part).rows)
        progress(f"sampled {len(rows)}/{config.num_rows} rows")
    text = DistillText(tuple(rows))
    save_text(path, text)
    return text
