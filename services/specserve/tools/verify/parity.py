"""Parity: the same tokens with speculation on and off, for greedy and for seeded `coupled`.

Promise (float32): equal, or the target's own two best candidates were closer than TIE_MARGIN at the
first difference, where a forward of another shape may flip them. In bfloat16 the differences are
counted and their margins shown; the gate there only refuses differences that are no near-ties.
Knows requests and texts; knows no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import MAX_LOGPROBS, Generated, Job, TextClient
from specserve.tools.terminal import Progress, table
from specserve.tools.verify.divergence import (
    Divergence,
    divergence,
    first_difference,
    told_divergences,
)

TIE_MARGIN = {"float32": 1e-4, "bfloat16": 0.25}
"""Largest gap (in log-probability, after temperature and noise) that counts as a near-tie."""

SEED = 20240917


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
class ModeReport:
    """What one mode showed."""

    mode: str
    rule: AcceptanceRule
    num_prompts: int
    num_tokens: int
    """Tokens of the off-run that were compared: none behind a first difference."""
    num_drafted_on: int
    num_drafted_off: int
    num_accepted_on: int
    longest_block: int
    """Most draft tokens of a round of the on-run."""
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What all modes showed."""

    dtype: str
    method: str
    modes: tuple[ModeReport, ...]

    @property
    def passed(self) -> bool:
        """Every mode holds."""
        return all(map(self._holds, self.modes))

    def passed_rule(self, rule: AcceptanceRule) -> bool:
        """Every mode of one rule holds; a rule without a mode has nothing to show."""
        return all(self._holds(report) for report in self.modes if report.rule is rule)

    @property
    def num_tokens(self) -> int:
        """Tokens compared in the mode that has the fewest."""
        return min((report.num_tokens for report in self.modes), default=0)

    def longest_block(self, rule: AcceptanceRule) -> int:
        """Most draft tokens of a round of one rule; 0 for a rule without a mode."""
        return max((r.longest_block for r in self.modes if r.rule is rule), default=0)

    def _holds(self, report: ModeReport) -> bool:
        """Equal up to near-ties, drafting when on, and not drafting when off."""
        limit = TIE_MARGIN[self.dtype]
        return (
            report.num_drafted_on > 0
            and report.num_drafted_off == 0
            and all(d.margin <= limit for d in report.divergences)
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
                str(report.longest_block),
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
            "longest block",
            "divergences",
            "largest margin",
        )
        lines = [f"parity, {self.method}, {self.dtype}, near-tie below {TIE_MARGIN[self.dtype]:g}"]
        lines.append(table(header, rows))
        lines += [f"  {report.mode}: {d}" for report in self.modes for d in report.divergences]
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
                    "num_accepted_on": report.num_accepted_on,
                    "longest_block": report.longest_block,
                    "divergences": [d.as_json() for d in report.divergences],
                }
                for report in self.modes
            ],
        }


async def compare_modes(
    client: TextClient,
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
        names = [name for name, _ in prompts]
        divergences = _accounted_for(names, jobs, on, off)
        if divergences is None:
            divergences = await told_divergences(client, names, jobs, on, off)
        reports.append(_report(mode, on, off, divergences))
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
        sampling=replace(job.sampling, num_logprobs=MAX_LOGPROBS),
    )


def _accounted_for(
    names: Sequence[str], jobs: Sequence[Job], on: Sequence[Generated], off: Sequence[Generated]
) -> list[Divergence] | None:
    """Judge every difference by the off-run itself; None where that carried no candidates."""
    divergences = []
    for name, job, ours, theirs in zip(names, jobs, on, off, strict=True):
        position = first_difference(ours.token_ids, theirs.token_ids)
        if position is None:
            continue
        if not theirs.logprobs:
            return None
        told = theirs.candidates_at(position)
        divergences.append(divergence(name, job, position, ours.token_ids, theirs.token_ids, told))
    return divergences


def _report(
    mode: Mode,
    on: Sequence[Generated],
    off: Sequence[Generated],
    divergences: Sequence[Divergence],
) -> ModeReport:
    return ModeReport(
        mode.name,
        mode.rule,
        len(on),
        sum(map(_num_compared, on, off)),
        sum(g.record.num_draft_tokens for g in on),
        sum(g.record.num_draft_tokens for g in off),
        sum(g.record.num_accepted_draft_tokens for g in on),
        max((drafted for g in on for drafted in g.record.per_step_drafted), default=0),
        tuple(divergences),
    )


def _num_compared(on: Generated, off: Generated) -> int:
    position = first_difference(on.token_ids, off.token_ids)
    return len(off.token_ids) if position is None else min(position + 1, len(off.token_ids))
