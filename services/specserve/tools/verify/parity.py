"""Parity: the same tokens with speculation on and off, for greedy and for seeded `coupled`.

Promise (float32): equal, or the target's own two best candidates were closer than TIE_MARGIN at the
first difference, where a forward of another shape may flip them. In bfloat16 the differences are
counted and their margins shown; the gate there only refuses differences that are no near-ties.
Knows the gate; the services are plain processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specserve.config import EngineConfig, SpeculativeConfig, SpeculativeMethod
from specserve.speculation.randomness import exponential_noise
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import Generated, GenerationClient, Job
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.models import resolve_pair
from specserve.tools.prompts import read_prompts, to_token_ids
from specserve.tools.terminal import Progress, table

TIE_MARGIN = {"float32": 1e-4, "bfloat16": 0.25}
"""Largest gap (in log-probability, after temperature and noise) that counts as a near-tie."""

NUM_LOGPROBS = 20

BLOCK_SIZE = 16
"""Tokens of a KV block."""

SEED = 20240917


@dataclass(frozen=True, slots=True)
class ParityOptions:
    """What to compare."""

    target: str | None
    draft: str | None
    dtype: str
    prompts: Path | None
    num_prompts: int | None
    max_tokens: int
    num_speculative_tokens: int
    method: SpeculativeMethod
    concurrency: int
    cache_dir: str | None


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of sampling."""

    name: str
    rule: AcceptanceRule
    temperature: float


MODES = (
    Mode("greedy", AcceptanceRule.GREEDY, 0.0),
    Mode("coupled T=0.8", AcceptanceRule.COUPLED, 0.8),
    Mode("coupled T=1.0", AcceptanceRule.COUPLED, 1.0),
)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of one prompt."""

    prompt_id: str
    position: int
    """Output position of the first difference."""
    margin: float
    """Score of the off-run's token minus the on-run's, by the off-run's target; inf if unknown."""


@dataclass(frozen=True, slots=True)
class ModeReport:
    """What one mode showed."""

    mode: str
    num_prompts: int
    num_tokens: int
    """Tokens of the off-run that were compared."""
    num_drafted_on: int
    num_drafted_off: int
    num_accepted_on: int
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What all modes showed."""

    dtype: str
    method: SpeculativeMethod
    modes: tuple[ModeReport, ...]

    @property
    def passed(self) -> bool:
        """Equal up to near-ties, drafting when on, and not drafting when off."""
        limit = TIE_MARGIN[self.dtype]
        return all(
            report.num_drafted_on > 0
            and report.num_drafted_off == 0
            and all(d.margin <= limit for d in report.divergences)
            for report in self.modes
        )

    def table(self) -> str:
        """Lay the report out for people."""
        rows = [
            (
                report.mode,
                str(report.num_prompts),
                str(report.num_tokens),
                str(report.num_drafted_on),
                str(report.num_drafted_off),
                f"{report.num_accepted_on / max(1, report.num_drafted_on):.3f}",
                str(len(report.divergences)),
                f"{max((d.margin for d in report.divergences), default=0.0):.2e}",
            )
            for report in self.modes
        ]
        header = (
            "mode",
            "prompts",
            "tokens",
            "drafted on",
            "drafted off",
            "acceptance",
            "divergences",
            "largest margin",
        )
        lines = [f"parity, {self.method}, {self.dtype}, near-tie below {TIE_MARGIN[self.dtype]:g}"]
        lines.append(table(header, rows))
        lines += [
            f"  {report.mode}: prompt {d.prompt_id} differs first at {d.position}, "
            f"margin {d.margin:.2e}"
            for report in self.modes
            for d in report.divergences
        ]
        return "\n".join(lines)

    def record(self) -> dict[str, object]:
        """Give the report as JSON values."""
        return {
            "suite": "parity",
            "dtype": self.dtype,
            "method": self.method,
            "passed": self.passed,
            "modes": [
                {
                    "mode": report.mode,
                    "num_prompts": report.num_prompts,
                    "num_tokens": report.num_tokens,
                    "num_drafted_on": report.num_drafted_on,
                    "num_drafted_off": report.num_drafted_off,
                    "divergences": [
                        {"prompt": d.prompt_id, "position": d.position, "margin": d.margin}
                        for d in report.divergences
                    ],
                }
                for report in self.modes
            ],
        }


async def run_parity_suite(options: ParityOptions) -> ParityReport:
    """Start a pair and compare all modes over all prompts."""
    # Heavy (transformers), and only needed here.
    from specserve.model.tokenizer import load_tokenizer

    speculative = SpeculativeConfig(
        method=options.method,
        model=options.draft,
        num_speculative_tokens=options.num_speculative_tokens,
    )
    pair = resolve_pair(options.target, speculative, options.cache_dir)
    if pair.speculative is None:
        raise RuntimeError("a pair without a draft cannot be compared")
    tokenizer = load_tokenizer(EngineConfig(model=pair.target))
    prompts = read_prompts(options.prompts, options.num_prompts)
    ids = [to_token_ids(tokenizer, prompt) for prompt in prompts]
    spec = PairSpec(
        target=pair.target,
        draft=pair.speculative.model,
        speculative_config=pair.speculative.model_dump_json(exclude_none=True),
        num_gateways=0,
        engine_flags=("--dtype", options.dtype, *_engine_flags(ids, options)),
    )
    progress = Progress()
    async with (
        LocalPair(spec) as local,
        GenerationClient(local.orchestrators[0].address) as client,
    ):
        await client.wait_ready()
        named = [(prompt.prompt_id, tokens) for prompt, tokens in zip(prompts, ids, strict=True)]
        reports = await compare_modes(
            client,
            named,
            max_tokens=options.max_tokens,
            concurrency=options.concurrency,
            progress=progress,
        )
    progress.close()
    return ParityReport(options.dtype, options.method, reports)


def _engine_flags(ids: Sequence[Sequence[int]], options: ParityOptions) -> tuple[str, ...]:
    """One thread, as bit-equality is claimed for; a pool that keeps every prompt between runs."""
    answer = options.max_tokens + options.num_speculative_tokens + 1
    needed = sum(1 + (len(tokens) + answer) // BLOCK_SIZE for tokens in ids)
    return (
        "--num-threads=1",
        f"--block-size={BLOCK_SIZE}",
        # With the answers of the run before, and of this one.
        f"--num-kv-blocks={2 * needed}",
    )


async def compare_modes(
    client: GenerationClient,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    *,
    max_tokens: int,
    concurrency: int,
    progress: Progress,
    modes: Sequence[Mode] = MODES,
    ignore_eos: bool = False,
) -> tuple[ModeReport, ...]:
    """Decode all prompts, (name, token ids), with speculation off and on, mode by mode."""
    reports = []
    for mode in modes:
        jobs = [
            replace(_job(mode, max_tokens, index, ids), ignore_eos=ignore_eos)
            for index, (_, ids) in enumerate(prompts)
        ]
        progress(f"{mode.name}: off", 0.0)
        off = await client.generate_all([_switched_off(job) for job in jobs], concurrency)
        progress(f"{mode.name}: on", 0.5)
        on = await client.generate_all(jobs, concurrency)
        progress(f"{mode.name}: on", 1.0)
        reports.append(_compare(mode, [name for name, _ in prompts], jobs, on, off))
    return tuple(reports)


def _job(mode: Mode, max_tokens: int, index: int, tokens: tuple[int, ...]) -> Job:
    sampling = SamplingParams(
        rule=mode.rule,
        seed=SEED + index,
        choice=0,
        temperature=mode.temperature,
    )
    return Job(f"parity-{mode.name}-{index}-on", tokens, sampling, max_tokens)


def _switched_off(job: Job) -> Job:
    return replace(
        job,
        request_id=job.request_id.removesuffix("on") + "off",
        num_speculative_tokens=0,
        # The off-run judges every difference, so it carries the target's own candidates.
        sampling=replace(job.sampling, num_logprobs=NUM_LOGPROBS),
    )


def _compare(
    mode: Mode,
    names: Sequence[str],
    jobs: Sequence[Job],
    on: Sequence[Generated],
    off: Sequence[Generated],
) -> ModeReport:
    divergences = []
    for name, job, left, right in zip(names, jobs, on, off, strict=True):
        if left.token_ids == right.token_ids:
            continue
        position = next(
            (
                i
                for i, (a, b) in enumerate(zip(left.token_ids, right.token_ids, strict=False))
                if a != b
            ),
            min(len(left.token_ids), len(right.token_ids)),
        )
        margin = _margin(job, left, right, position)
        divergences.append(Divergence(name, position, margin))
    return ModeReport(
        mode.name,
        len(jobs),
        sum(len(g.token_ids) for g in off),
        sum(g.record.num_draft_tokens for g in on),
        sum(g.record.num_draft_tokens for g in off),
        sum(g.record.num_accepted_draft_tokens for g in on),
        tuple(divergences),
    )


def _margin(job: Job, on: Generated, off: Generated, position: int) -> float:
    """By how much the off-run's target preferred its own token to the on-run's."""
    if position >= min(len(on.token_ids), len(off.token_ids)):
        return float("inf")
    row = off.logprobs[position]
    chosen = {off.token_ids[position]: row.logprob}
    chosen |= dict(zip(row.token_ids, row.logprobs, strict=True))
    ours, theirs = on.token_ids[position], off.token_ids[position]
    if ours not in chosen:
        return float("inf")
    gap = chosen[theirs] - chosen[ours]
    sampling = job.sampling
    if sampling.rule is AcceptanceRule.COUPLED:
        noise = exponential_noise(
            sampling.seed,
            sampling.choice,
            len(job.prompt_token_ids) + position,
            np.array([theirs, ours]),
        )
        gap = gap / sampling.temperature - float(np.log(noise[0]) - np.log(noise[1]))
    return abs(gap)
