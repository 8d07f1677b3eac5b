"""How much a check does: full size for a GPU, tiny for a test on a CPU. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.tools.gpu_check.shapes import (
    DRAFT_1B,
    SMALL,
    TARGET_8B,
    TINY_DRAFT,
    TINY_SMALL,
    TINY_TARGET,
    Shape,
)


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Shapes and sizes of one check."""

    small: Shape
    """Target of parity and law, float32; its draft is the same without its last layers."""
    small_draft_layers: int
    target: Shape
    draft: Shape
    dtype: str
    """Of target and draft when they are timed."""
    num_parity_prompts: int
    num_parity_tokens: int
    num_draws: int
    """Sequences of each case of the law."""
    rows: tuple[int, ...]
    """New tokens a sequence in one step of the target."""
    batches: tuple[int, ...]
    """Sequences."""
    context_length: int
    """Tokens cached by each sequence while steps are timed."""
    num_repeats: int
    """Steps whose median is taken."""
    copy_bytes: int
    """Of the copy that measures the memory."""
    num_rate_tokens: int
    """Output tokens of each request while tokens/s are measured."""
    acceptance_length: float
    """Synthetic: tokens committed by a full round."""
    num_speculative_tokens: int = 4
    prompt_length: int = 64

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of 16 tokens that hold every sequence of the largest batch, twice."""
        longest = self.context_length + self.prompt_length + self.num_rate_tokens + max(self.rows)
        return 2 * max(self.batches) * (longest // 16 + 2)


FULL = CheckPlan(
    small=SMALL,
    small_draft_layers=2,
    target=TARGET_8B,
    draft=DRAFT_1B,
    dtype="bfloat16",
    num_parity_prompts=24,
    num_parity_tokens=48,
    num_draws=2000,
    rows=(1, 5, 9),
    batches=(1, 8, 32, 64),
    context_length=256,
    num_repeats=12,
    copy_bytes=4 << 30,
    num_rate_tokens=64,
    acceptance_length=3.36,
)

TINY = CheckPlan(
    small=TINY_SMALL,
    small_draft_layers=2,
    target=TINY_TARGET,
    draft=TINY_DRAFT,
    dtype="bfloat16",
    num_parity_prompts=4,
    num_parity_tokens=96,
    num_draws=240,
    rows=(1, 5),
    batches=(1, 4),
    context_length=32,
    num_repeats=2,
    copy_bytes=1 << 24,
    num_rate_tokens=48,
    acceptance_length=3.36,
)
