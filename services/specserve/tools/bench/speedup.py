"""Tokens/s with and without speculation on real prompts, by category.

Knows the generation service; the clock is the client's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import ConfigurationError
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import Generated, GenerationClient, Job
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.models import resolve_pair
from specserve.tools.prompts import Prompt, read_prompts, to_token_ids
from specserve.tools.terminal import Progress, say, table
from specserve.tools.verify.divergence import told_divergences


@dataclass(frozen=True, slots=True)
class SpeedupOptions:
    """What to measure."""

    prompts: Path | None
    num_prompts: int | None
    max_tokens: int
    num_speculative_tokens: int
    temperature: float
    concurrency: int
    cache_dir: str | None


async def run_speedup_suite(options: SpeedupOptions) -> dict[str, float]:
    """Decode every prompt with and without speculation, in turn, through the embedded pair."""
    # Heavy (transformers), and only needed here.
    from specserve.model.tokenizer import load_tokenizer

    speculative = SpeculativeConfig(num_speculative_tokens=options.num_speculative_tokens)
    pair = resolve_pair(None, speculative, options.cache_dir)
    if pair.speculative is None:
        raise ConfigurationError("--num-speculative-tokens: 0 leaves nothing to compare")
    tokenizer = load_tokenizer(EngineConfig(model=pair.target))
    prompts = read_prompts(options.prompts, options.num_prompts)
    jobs = [_job(options, i, to_token_ids(tokenizer, p)) for i, p in enumerate(prompts)]
    spec = PairSpec(
        target=pair.target,
        draft=pair.speculative.model,
        speculative_config=pair.speculative.model_dump_json(exclude_none=True),
        num_gateways=0,
    )
    progress = Progress()
    on: list[Generated] = []
    off: list[Generated] = []
    wall_on = wall_off = 0.0
    async with (
        LocalPair(spec) as local,
        GenerationClient(local.orchestrators[0].address) as client,
    ):
        await client.wait_ready()
        await client.generate(replace(jobs[0], request_id="warm", max_tokens=8))
        for first in range(0, len(jobs), options.concurrency):
            group = jobs[first : first + options.concurrency]
            began = time.perf_counter()
            off += await client.generate_all([_off(job) for job in group], options.concurrency)
            middle = time.perf_counter()
            on += await client.generate_all(group, options.concurrency)
            wall_off += middle - began
            wall_on += time.perf_counter() - middle
            progress("prompts", (first + len(group)) / len(jobs))
        progress.close()
        figures = _report(prompts, on, off, wall_on, wall_off)
        if options.temperature == 0:
            names = [prompt.prompt_id for prompt in prompts]
            differences = await told_divergences(client, names, jobs, on, off)
            say(f"texts that differ: {len(differences)} of {len(jobs)}")
            for difference in differences:
                say(f"  {difference}")
            figures["speedup.divergences"] = float(len(differences))
    return figures


def _job(options: SpeedupOptions, index: int, tokens: tuple[int, ...]) -> Job:
    rule = AcceptanceRule.GREEDY if options.temperature == 0 else AcceptanceRule.STANDARD
    sampling = SamplingParams(rule, seed=index, choice=0, temperature=options.temperature)
    return Job(f"speedup-{index}", tokens, sampling, options.max_tokens)


def _off(job: Job) -> Job:
    return replace(job, request_id=f"{job.request_id}-off", num_speculative_tokens=0)


def _rate(generated: Generated) -> float:
    """Tokens per second after the first block: decoding without the prompt."""
    times = generated.block_at_s
    if len(times) < 2 or times[-1] == times[0]:
        return 0.0
    return (len(generated.token_ids) - 1) / (times[-1] - times[0])


def _report(
    prompts: Sequence[Prompt],
    on: Sequence[Generated],
    off: Sequence[Generated],
    wall_on: float,
    wall_off: float,
) -> dict[str, float]:
    rows = []
    for category in [*dict.fromkeys(p.category for p in prompts), "overall"]:
        chosen = [i for i, p in enumerate(prompts) if category in (p.category, "overall")]
        pairs = [(_rate(on[i]), _rate(off[i])) for i in chosen]
        ratios = [a / b for a, b in pairs if a and b]
        drafted = sum(on[i].record.num_draft_tokens for i in chosen)
        accepted = sum(on[i].record.num_accepted_draft_tokens for i in chosen)
        steps = sum(on[i].record.num_spec_steps for i in chosen)
        rows.append(
            (
                category,
                str(len(chosen)),
                f"{statistics.median(b for _, b in pairs):.1f}",
                f"{statistics.median(a for a, _ in pairs):.1f}",
                f"{statistics.median(ratios) if ratios else 0.0:.2f}",
                f"{accepted / max(1, drafted):.3f}",
                f"{1 + accepted / max(1, steps):.2f}",
            )
        )
    header = ("category", "prompts", "off tok/s", "on tok/s", "speedup", "acceptance", "length")
    say(table(header, rows))
    tokens_on, tokens_off = (sum(len(g.token_ids) for g in side) for side in (on, off))
    whole = (tokens_on / wall_on) / (tokens_off / wall_off)
    say(f"whole run, prompts included: {whole:.2f}x")
    return {"speedup.median": float(rows[-1][4]), "speedup.whole_run": whole}
