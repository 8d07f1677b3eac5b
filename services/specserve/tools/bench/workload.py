"""What a run decodes and how it is split into pairs. Knows prompt files and a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError
from specserve.tools.bench.conditions import ModelFacts, PromptFacts, prompt_facts
from specserve.tools.bench.level import LevelPlan
from specserve.tools.bench.sample import BenchPrompt
from specserve.tools.load.arrivals import Pacing
from specserve.tools.prompts import read_prompts, to_token_ids

PROMPTS_VARIABLE = "SPECSERVE_BENCH_PROMPTS"
"""Names the prompt file when --prompts does not."""

MIN_PAIRS = 6
"""Above concurrency 1 prompts are used again until there are so many pairs."""

ALL = 10**9


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, in the order they are sent: the categories take turns, so that halves are alike."""

    prompts: tuple[BenchPrompt, ...]
    facts: PromptFacts


def load_workload(
    path: str | None, limit: int | None, tokenizer_of: EngineConfig | None
) -> Workload:
    """Read the prompts, and turn them into token ids where the tokenizer is at hand.

    Args:
        path: prompt file; None takes SPECSERVE_BENCH_PROMPTS, else the shipped six.
        tokenizer_of: the target; None leaves the tokens to the server.

    Raises:
        ConfigurationError: the file is missing or a line is no prompt.
    """
    given = path or os.environ.get(PROMPTS_VARIABLE)
    # Read before the tokenizer's library is loaded: a wrong file is told at once.
    prompts = read_prompts(Path(given) if given else None, limit if limit is not None else ALL)
    if not prompts:
        raise ConfigurationError(f"--prompts: {given}: no prompt in it")
    ids: list[tuple[int, ...]] = [()] * len(prompts)
    if tokenizer_of is not None:
        # Heavy (transformers), and only needed here.
        from specserve.model.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(tokenizer_of)
        ids = [to_token_ids(tokenizer, prompt) for prompt in prompts]
    ready = tuple(
        BenchPrompt(prompt.prompt_id, prompt.category, prompt.text, own)
        for prompt, own in zip(prompts, ids, strict=True)
    )
    source = Path(given).name if given else "shipped"
    return Workload(ready, prompt_facts(source, ready))


def plan_level(
    pacing: Pacing,
    num_prompts: int,
    num_pairs: int | None,
    requests_per_wave: int | None,
    padding_credit: float | None = None,
) -> LevelPlan:
    """Split a level into pairs: one prompt each at concurrency 1, else as many as run at once.

    Args:
        num_pairs: None takes every prompt once, and MIN_PAIRS pairs at least above concurrency 1.
        requests_per_wave: None takes the concurrency, and all prompts at an arrival rate.
    """
    per_wave = requests_per_wave or pacing.concurrency or num_prompts
    if num_pairs is None:
        whole = -(-num_prompts // per_wave)
        num_pairs = whole if per_wave == 1 else max(MIN_PAIRS, whole)
    return LevelPlan(pacing, num_pairs, per_wave, padding_credit)


def check_fits(prompts: Sequence[BenchPrompt], max_tokens: int, max_model_len: int) -> None:
    """Refuse prompts that leave no room for the answers.

    Raises:
        ConfigurationError: naming the prompt.
    """
    for prompt in prompts:
        if len(prompt.token_ids) + max_tokens > max_model_len:
            raise ConfigurationError(
                f"--max-tokens: prompt {prompt.prompt_id} has {len(prompt.token_ids)} tokens, and "
                f"with {max_tokens} more it is longer than the context of {max_model_len}"
            )


def check_remembered(
    prompts: Sequence[BenchPrompt], max_tokens: int, model: ModelFacts, *, num_answers: int
) -> None:
    """Refuse prompts that a prefix cache cannot hold all at once.

    What was sent first would be forgotten again before it is measured, and by chance on one side
    and not on the other.

    Args:
        num_answers: different answers to a prompt that are kept beside it: one where all sides
            say the same.

    Raises:
        ConfigurationError: saying how many blocks, or how few prompts, would do.
    """
    size = model.block_size
    answer = num_answers * -(-max_tokens // size)
    needed, num_fitting = 0, 0
    for prompt in prompts:
        needed += -(-len(prompt.token_ids) // size) + answer
        num_fitting += needed <= model.num_kv_blocks
    if needed > model.num_kv_blocks:
        raise ConfigurationError(
            f"--num-prompts: {len(prompts)} prompts and their answers fill {needed} KV blocks of "
            f"{size} tokens, and the {model.role} has {model.num_kv_blocks}: warm prefixes would "
            f"be forgotten before they are measured; --num-kv-blocks {needed}, or at most "
            f"{num_fitting} prompts"
        )
