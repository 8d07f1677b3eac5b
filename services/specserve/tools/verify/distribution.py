"""Distribution: texts through the real binaries and the real gRPC path, against an exact law.

An enumerable pair is started as plain processes and asked for long and short texts, many at once,
in every way of sampling and proposing. What can be found, and the odds of a false alarm, are
declared before anything is drawn. Knows the cases and their tallies; the maths is theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.speculation.types import AcceptanceRule
from specserve.tools.generation_client import Generated, GenerationClient, Job
from specserve.tools.local import LocalPair
from specserve.tools.terminal import Progress, say, table
from specserve.tools.verify.chi_square import needed_draws, smallest_bias
from specserve.tools.verify.long_texts import TEXT_LENGTH, LongReport, LongTexts
from specserve.tools.verify.short_texts import LENGTH, ShortReport, exact_law, judge
from specserve.tools.verify.toy_cases import BIAS_CASE, CASES, SPEC, Case, toy_pair

FALSE_ALARM = 1e-4
"""Odds that the whole suite fails although nothing is wrong: half of it for the one test that must
find the bias, the rest shared out over the others."""

POWER = 0.99
BIAS = 0.005
PROBABILITY = 0.6
"""Of the token that the bias is added to."""

SHARE_OF_OTHERS = 16
"""The other cases get this part of the bias case's draws."""

LENGTHS = (1, 2, LENGTH)
NUM_OTHER_TESTS = len(CASES) * (3 + 2 * len(LENGTHS)) - 1
BIAS_THRESHOLD = FALSE_ALARM / 2
THRESHOLD = FALSE_ALARM / 2 / NUM_OTHER_TESTS
DOF = SPEC.vocab_size - 1


@dataclass(frozen=True, slots=True)
class DistributionOptions:
    """How much to draw."""

    concurrency: int = 96
    bias: float = BIAS
    num_sequences: int = 500
    """Short texts a case."""
    share: float = 1.0
    """Part of the draws that the bias needs; below 1 the bias is not found with the power."""
    cases: Sequence[Case] = CASES

    def num_draws(self, case: Case) -> int:
        """Return the draws of a case in long texts."""
        variance = PROBABILITY * (1 - PROBABILITY)
        needed = needed_draws(self.bias, variance, POWER, BIAS_THRESHOLD, DOF)
        return math.ceil(self.share * needed / (1 if case.name == BIAS_CASE else SHARE_OF_OTHERS))


@dataclass(frozen=True, slots=True)
class CaseReport:
    """What one case showed."""

    case: Case
    long: LongReport
    short: ShortReport
    num_draft_tokens: int
    num_accepted: int

    @property
    def passed(self) -> bool:
        """No test below its threshold, nothing impossible, and drafting where there should be."""
        thresholds = [THRESHOLD] * 3
        if self.case.name == BIAS_CASE:
            thresholds[0] = BIAS_THRESHOLD
        return (
            all(p >= t for p, t in zip(self.long.p_values, thresholds, strict=True))
            and self.long.num_impossible == 0
            and self.short.holds(THRESHOLD)
            and (self.num_draft_tokens > 0) == self.case.speculates
        )


@dataclass(frozen=True, slots=True)
class DistributionReport:
    """What all cases showed."""

    declared: str
    cases: tuple[CaseReport, ...]
    versions: tuple[str, ...]
    """Of the code that was tried, each "name=version"."""

    @property
    def passed(self) -> bool:
        """Every case holds."""
        return all(report.passed for report in self.cases)

    def passed_rule(self, rule: AcceptanceRule) -> bool:
        """Every case of one rule holds."""
        return all(report.passed for report in self.cases if report.case.rule is rule)

    def table(self) -> str:
        """Lay the report out for people."""
        header = (
            "case",
            "draws",
            "texts",
            "accepted",
            "p token",
            "p context",
            "p row",
            "TV",
            *(f"p first {length}" for length in LENGTHS),
            "impossible",
            "",
        )
        rows = [
            (
                r.case.name,
                str(r.long.num_draws),
                str(r.short.num_draws),
                f"{r.num_accepted / max(1, r.num_draft_tokens):.3f}",
                *(f"{p:.2g}" for p in r.long.p_values),
                f"{r.long.total_variation:.4f}",
                *(f"{m.p_value:.2g}" for m in r.short.marginals),
                str(r.long.num_impossible + r.short.num_impossible),
                "ok" if r.passed else "FAILED",
            )
            for r in self.cases
        ]
        return table(header, rows)

    def record(self) -> dict[str, object]:
        """Give the report as JSON values."""
        return {
            "suite": "distribution",
            "passed": self.passed,
            "declared": self.declared,
            "versions": list(self.versions),
            "false_alarm": FALSE_ALARM,
            "threshold_bias_test": BIAS_THRESHOLD,
            "threshold": THRESHOLD,
            "cases": [
                {
                    "case": r.case.name,
                    "passed": r.passed,
                    "num_draws": r.long.num_draws,
                    "num_sequences": r.short.num_draws,
                    "num_draft_tokens": r.num_draft_tokens,
                    "acceptance_rate": r.num_accepted / max(1, r.num_draft_tokens),
                    "p_values": list(r.long.p_values),
                    "total_variation": r.long.total_variation,
                    "sequences": [
                        {
                            "length": m.length,
                            "p_value": m.p_value,
                            "total_variation": m.total_variation,
                            "tolerance": m.tolerance,
                        }
                        for m in r.short.marginals
                    ],
                    "num_impossible": r.long.num_impossible + r.short.num_impossible,
                }
                for r in self.cases
            ],
        }


def declaration(options: DistributionOptions) -> str:
    """Say what the suite will do, and what it can find, before it draws anything."""
    variance = PROBABILITY * (1 - PROBABILITY)
    lines = []
    for case in options.cases:
        if case.name == BIAS_CASE:
            num_draws = options.num_draws(case)
            bias = smallest_bias(num_draws, variance, POWER, BIAS_THRESHOLD, DOF)
            lines.append(
                f"{case.name}: {num_draws} draws find a bias of {bias:.4f} in a token of "
                f"probability {PROBABILITY:g} with power {POWER:g} at a false alarm of "
                f"{BIAS_THRESHOLD:g}"
            )
    others = [options.num_draws(case) for case in options.cases if case.name != BIAS_CASE]
    if others:
        bias = smallest_bias(min(others), variance, POWER, THRESHOLD, DOF)
        lines.append(f"every other case: {min(others)} draws find a bias of {bias:.4f}")
    lines.append(
        f"and {options.num_sequences} sequences of {LENGTH} tokens a case by chi-square and total "
        f"variation; each test at {THRESHOLD:.1e}, the whole suite at a false alarm of "
        f"{FALSE_ALARM:g}"
    )
    return "; ".join(lines)


async def run_distribution_suite(options: DistributionOptions) -> DistributionReport:
    """Start the enumerable pair and test every case."""
    declared = declaration(options)
    say(f"declared before the run: {declared}")
    progress = Progress()
    async with (
        LocalPair(toy_pair()) as local,
        GenerationClient(local.orchestrators[0].address) as client,
    ):
        pair = await client.wait_ready()
        reports = [
            await _run_case(client, case, number, options, progress)
            for number, case in enumerate(options.cases)
        ]
    progress.close()
    return DistributionReport(declared, tuple(reports), tuple(pair.target.versions))


async def _run_case(
    client: GenerationClient,
    case: Case,
    number: int,
    options: DistributionOptions,
    progress: Progress,
) -> CaseReport:
    texts, counts, drafted = LongTexts(case), Counter[tuple[int, ...]](), Counter[str]()
    jobs = _jobs(case, number, options)
    num_done = 0

    def take(job: Job, done: Generated) -> None:
        nonlocal num_done
        num_done += 1
        drafted["drafted"] += done.record.num_draft_tokens
        drafted["accepted"] += done.record.num_accepted_draft_tokens
        if job.max_tokens == LENGTH:
            counts[done.token_ids] += 1
        else:
            texts.add(done.token_ids, done.origins)
        progress(case.name, num_done / len(jobs))

    await client.generate_each(jobs, options.concurrency, take)
    return CaseReport(
        case,
        texts.report(),
        judge(counts, exact_law(case), LENGTHS, THRESHOLD),
        drafted["drafted"],
        drafted["accepted"],
    )


def _jobs(case: Case, number: int, options: DistributionOptions) -> list[Job]:
    """Make the requests of a case, each with a seed of its own."""
    lengths = [TEXT_LENGTH] * math.ceil(options.num_draws(case) / TEXT_LENGTH)
    lengths += [LENGTH] * options.num_sequences
    return [
        case.job(f"law-{number}-{index}", (number << 32) + index, length)
        for index, length in enumerate(lengths)
    ]
