"""Measures a student on held-out rows: what a draft of it would get accepted.

Knows the student and sampled text; knows no training.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaForCausalLM

from specserve.errors import ModelUnavailable
from specserve.model.draft_package import VOCAB_FILE
from specserve.tools.distill.batch import TargetSettings, column_of, make_batch
from specserve.tools.distill.student import PACKED_ATTENTION, hidden_states
from specserve.tools.distill.text import DistillText, FloatArray, IntArray

NUM_SPECULATIVE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Validation:
    """Figures on held-out answers."""

    greedy_match: float
    """Share of positions where the student's argmax is the target's, all rows."""
    greedy_rows_match: float | None
    """The same on rows that were answered greedily; None without such rows."""
    overlap: float
    """Mean of sum min(p, q) over the target's top ids: 1 - TV at temperature 1, from below."""
    coupled_match: float
    """Mean chance that both draw the same token from common noise, over the top ids: acceptance
    of the coupled rule at temperature 1, from below."""
    greedy_tokens_per_round: float | None
    """Committed tokens per round at K = 4 on greedily answered rows, rounds walked."""
    sampled_tokens_per_round: float | None
    """Expected committed tokens per round at K = 4 at temperature 1, sampled rows."""
    by_kind: dict[str, float] = field(default_factory=dict)
    """Greedy tokens per round by kind of prompt, where the text names kinds."""

    def __str__(self) -> str:
        return (
            f"match {self.greedy_match:.4f} (greedy rows {_shown(self.greedy_rows_match)}) "
            f"1-TV {self.overlap:.4f} coupled {self.coupled_match:.4f} "
            f"tokens/round K={NUM_SPECULATIVE_TOKENS} "
            f"greedy {_shown(self.greedy_tokens_per_round)} "
            f"T=1 {_shown(self.sampled_tokens_per_round)}"
            + "".join(f" {kind} {value:.2f}" for kind, value in self.by_kind.items())
        )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


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


def coupled_match(p: FloatArray, q: FloatArray) -> FloatArray:
    """Return the chance that the coupled rule draws one token from p and q, from below.

    Both take the least of E_j / p_j and E_j / q_j over common exponentials E; token i wins both
    with chance 1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri et al., 2024, arXiv:2408.07978). What
    lies outside the listed tokens is counted as if p and q agreed nowhere there.

    Args:
        p, q: [T, k] probabilities of the same tokens; rows need not sum to 1.
    """
    result = np.zeros(len(p), np.float64)
    p_rest, q_rest = 1 - p.sum(-1), 1 - q.sum(-1)
    for i in range(p.shape[1]):
        both = (p[:, i] > 0) & (q[:, i] > 0)
        by_p = p[both] / p[both, i, None]
        by_q = q[both] / q[both, i, None]
        rest = p_rest[both].clip(0) / p[both, i] + q_rest[both].clip(0) / q[both, i]
        result[both] += 1 / (np.maximum(by_p, by_q).sum(-1) + rest)
    return result.astype(np.float32)


def validate(
    student: LlamaForCausalLM,
    text: DistillText,
    row_numbers: tuple[int, ...],
    vocab: tuple[int, ...],
    columns: IntArray,
    rows_at_once: int = 16,
) -> Validation:
    """Measure the student, its head cut to `vocab`, on the named rows."""
    settings = TargetSettings(0.0, 0.0, prompt_weight=0.0, prompt_skip=1 << 20)
    head = student.lm_head.weight.detach()[list(vocab)].bfloat16()
    device = head.device
    matches: list[npt.NDArray[np.bool_]] = []
    overlaps: list[FloatArray] = []
    coupled: list[FloatArray] = []
    for start in range(0, len(row_numbers), rows_at_once):
        rows = [text.rows[i] for i in row_numbers[start : start + rows_at_once]]
        batch = make_batch(rows, columns, settings).to(device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            hidden = hidden_states(student, batch.packed).bfloat16()[batch.selected]
        ends = np.cumsum([len(row.answer) for row in rows])[:-1].tolist()
        for row, part in zip(rows, torch.tensor_split(hidden, ends), strict=True):
            logits = (part @ head.T).float().cpu()
            probs = logits.softmax(-1)
            row_columns = columns[row.top_ids]
            q = probs.gather(1, torch.from_numpy(np.maximum(row_columns, 0))).numpy()
            p = np.exp(row.top_logprobs)
            q *= row_columns >= 0
            overlaps.append(np.minimum(p, q).sum(-1))
            coupled.append(coupled_match(p, q))
            matches.append(logits.argmax(-1).numpy() == row_columns[:, 0])
    numbered = list(zip(row_numbers, matches, overlaps, strict=True))
    greedy = [m for i, m, _ in numbered if text.rows[i].is_greedy]
    sampled = [o for i, _, o in numbered if not text.rows[i].is_greedy]
    kinds = {text.rows[i].kind for i in row_numbers if text.rows[i].is_greedy} - {""}
    return Validation(
        greedy_match=_mean(matches),
        greedy_rows_match=_mean(greedy) if greedy else None,
        overlap=_mean(overlaps),
        coupled_match=_mean(coupled),
        greedy_tokens_per_round=tokens_per_round(greedy) if greedy else None,
        sampled_tokens_per_round=(
            float(np.mean([expected_round(o, NUM_SPECULATIVE_TOKENS) for o in sampled]))
            if sampled
            else None
        ),
        by_kind={
            kind: tokens_per_round(
                [m for i, m, _ in numbered if text.rows[i].is_greedy and text.rows[i].kind == kind]
            )
            for kind in sorted(kinds)
        },
    )


def _mean(parts: Sequence[npt.NDArray[Any]]) -> float:
    return float(np.concatenate(parts).mean())


def tokens_per_round(matches: Sequence[npt.NDArray[np.bool_]]) -> float:
    """Return committed tokens per round at K = 4 over greedily answered rows."""
    rounds, tokens = np.array([walk_rounds(m, NUM_SPECULATIVE_TOKENS) for m in matches]).sum(0)
    return float(tokens / rounds)


def validate_folder(draft: Path, text: DistillText, held_out_every: int) -> Validation:
    """Measure a draft's directory, head cut as its `draft_vocab.json` says, on held-out rows.

    Raises:
        ModelUnavailable: it is no draft that `specserve distill` wrote.
    """
    for name in ("config.json", VOCAB_FILE):
        if not (draft / name).is_file():
            raise ModelUnavailable(f"--validate: {draft / name} is missing")
    student = LlamaForCausalLM.from_pretrained(
        draft, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
    )
    vocab = tuple(json.loads((draft / VOCAB_FILE).read_text())["token_ids"])
    columns = column_of(vocab, student.config.vocab_size)
    _, held = text.held_out(held_out_every)
    return validate(student, text, held, vocab, columns)
