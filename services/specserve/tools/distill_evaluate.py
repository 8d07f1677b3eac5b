"""Measures a student on held-out rows: what a draft of it would get accepted.

Knows the student and sampled text; knows no training.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaForCausalLM

from specserve.model.draft_package import VOCAB_FILE
from specserve.tools.distill_batch import TargetSettings, column_of, make_batch
from specserve.tools.distill_student import PACKED_ATTENTION, hidden_states
from specserve.tools.distill_text import DistillText, FloatArray, IntArray

NUM_SPECULATIVE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Validation:
    """Figures on held-out answers."""

    greedy_match: float
    """Share of positions where the student's argmax is the target's, all rows."""
    greedy_rows_match: float
    """The same on rows that were answered greedily."""
    overlap: float
    """Mean of sum min(p, q) over the target's top ids: 1 - TV at temperature 1, from below."""
    greedy_tokens_per_round: float
    """Committed tokens per round at K = 4 on greedily answered rows, rounds walked."""
    sampled_tokens_per_round: float
    """Expected committed tokens per round at K = 4 at temperature 1, sampled rows."""

    def __str__(self) -> str:
        return (
            f"match {self.greedy_match:.4f} (greedy rows {self.greedy_rows_match:.4f}) "
            f"1-TV {self.overlap:.4f} tokens/round K={NUM_SPECULATIVE_TOKENS} "
            f"greedy {self.greedy_tokens_per_round:.3f} T=1 {self.sampled_tokens_per_round:.3f}"
        )


def walk_rounds(match: npt.NDArray[np.bool_], num_speculative_tokens: int) -> tuple[int, int]:
    """Return (rounds, tokens) of greedy rounds over a row whose matches are known.

    Exact under teacher forcing: up to its first miss the draft sees committed tokens only.
    """
    rounds = position = 0
    while position < len(match):
        ahead = match[position : position + num_speculative_tokens]
        accepted = len(ahead) if ahead.all() else int(ahead.argmin())
        position += accepted + 1
        rounds += 1
    return rounds, min(position, len(match))


def expected_round(overlap: FloatArray, num_speculative_tokens: int) -> float:
    """Return the mean over starts of 1 + a1 + a1 a2 + ... from per-position acceptance."""
    starts = len(overlap) - num_speculative_tokens
    if starts <= 0:
        return 1.0
    reached = np.ones(starts, np.float64)
    total = np.ones(starts, np.float64)
    for ahead in range(num_speculative_tokens):
        reached *= overlap[ahead : ahead + starts]
        total += reached
    return float(total.mean())


def validate(
    student: LlamaForCausalLM,
    text: DistillText,
    row_numbers: tuple[int, ...],
    vocab: tuple[int, ...],
    columns: IntArray,
    rows_at_once: int = 16,
) -> Validation:
    """Measure the student, its head cut to `vocab`, on the named rows."""
    settings = TargetSettings(sampled_weight=0.0, prompt_weight=0.0, prompt_skip=1 << 20)
    head = student.lm_head.weight.detach()[list(vocab)].bfloat16()
    matches: list[npt.NDArray[np.bool_]] = []
    overlaps: list[FloatArray] = []
    for start in range(0, len(row_numbers), rows_at_once):
        rows = [text.rows[i] for i in row_numbers[start : start + rows_at_once]]
        batch = make_batch(rows, columns, settings)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = hidden_states(student, batch.packed).bfloat16()[batch.selected]
        ends = np.cumsum([len(row.answer) for row in rows])[:-1].tolist()
        for row, part in zip(rows, torch.tensor_split(hidden, ends), strict=True):
            logits = (part @ head.T).float()
            probs = logits.softmax(-1)
            row_columns = columns[row.top_ids]
            q = probs.gather(1, torch.from_numpy(np.maximum(row_columns, 0))).numpy()
            p = np.exp(row.top_logprobs)
            overlaps.append((np.minimum(p, q) * (row_columns >= 0)).sum(-1))
            matches.append(logits.argmax(-1).numpy() == row_columns[:, 0])
    greedy = [m for m, i in zip(matches, row_numbers, strict=True) if i % 2 == 0]
    sampled = [o for o, i in zip(overlaps, row_numbers, strict=True) if i % 2 == 1]
    walked = np.array([walk_rounds(m, NUM_SPECULATIVE_TOKENS) for m in greedy]).sum(0)
    return Validation(
        greedy_match=float(np.concatenate(matches).mean()),
        greedy_rows_match=float(np.concatenate(greedy).mean()),
        overlap=float(np.concatenate(overlaps).mean()),
        greedy_tokens_per_round=float(walked[1] / walked[0]),
        sampled_tokens_per_round=float(
            np.mean([expected_round(o, NUM_SPECULATIVE_TOKENS) for o in sampled])
        ),
    )


def validate_folder(draft: Path, text: DistillText, held_out_every: int) -> Validation:
    """Measure a draft's directory, head cut as its `draft_vocab.json` says, on held-out rows."""
    student = LlamaForCausalLM.from_pretrained(
        draft, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
    )
    vocab = tuple(json.loads((draft / VOCAB_FILE).read_text())["token_ids"])
    columns = column_of(vocab, student.config.vocab_size)
    _, held = text.held_out(held_out_every)
    return validate(student, text, held, vocab, columns)
