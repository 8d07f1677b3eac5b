"""Distribution: texts through the real binaries and the real gRPC path, against an exact law.

Two enumerable pairs, a small one and a wide one, are started as plain processes and asked for
texts, many at once, in every way of sampling and proposing. What can be found, and the odds of a
false alarm, are declared before anything is drawn. Knows cases and tallies; the maths is theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specserve.speculation.types import AcceptanceRule
from specserve.tools.generation_client import Generated, GenerationClient, Job
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.terminal import Progress, say, table
from specserve.tools.verify.chi_square import TAIL_FACTOR, needed_draws, smallest_bias
from specserve.tools.verify.long_texts import TEXT_LENGTH, LongReport, LongTexts
from specserve.tools.verify.short_texts import LENGTH, ShortReport, exact_law, judge
from specserve.tools.verify.toy_cases import BIAS_CASE, CASES, SPEC, Case, toy_pair
from specserve.tools.verify.wide_cases import wide_cases, wide_pair
from specserve.tools.verify.wide_texts import WideTexts

FALSE_ALARM = 1e-4
"""Odds that the whole suite fails although nothing is wrong: half of it for the one test that must
find the bias, the rest shared out over the others."""

POWER = 0.99
BIAS = 0.005
PROBABILITY = 0.6
"""Of the token that the bias is added to."""

SHARE_OF_OTHERS = 16
"""The other cases of the small pair get this part of the bias case's draws ..."""

SHARE_OF_WIDE = 48
"""... and those of the wide one this: its draws are dearer, and what they are for is coarse."""

DEFAULT_K = 4
"""Draft tokens a round of the wide pair, where it speaks for no other."""

DEFAULT_TOP_K = 64
"""Of the draft's support, where nothing else is set."""

LENGTHS = (1, 2, LENGTH)
NUM_OTHER_TESTS = len(CASES) * (3 + 2 * len(LENGTHS)) + len(wide_cases(DEFAULT_K)) * 3 - 1
BIAS_THRESHOLD = FALSE_ALARM / 2 / TAIL_FACTOR
THRESHOLD = FALSE_ALARM / 2 / NUM_OTHER_TESTS / TAIL_FACTOR
DOF = SPEC.vocab_size - 1


@dataclass(frozen=True, slots=True)
class DistributionOptions:
    """How much to draw."""

    concurrency: int = 96
    bias: float = BIAS
    num_sequences: int = 2000
    """Short texts a case of the small pair."""
    share: float = 1.0
    """Part of the draws that the bias needs; below 1 the bias is not found with the power."""
    cases: Sequence[Case] = CASES
    """Of the small pair."""
    wide_cases: Sequence[Case] = wide_cases(DEFAULT_K)
    num_speculative_tokens: int = DEFAULT_K
    """Most draft tokens a round of the wide pair."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Of the draft that the pairs speak for, by the names that `--speculative-config` takes."""

    def num_draws(self, case: Case) -> int:
        """Return the draws of a case in long texts."""
        variance = PROBABILITY * (1 - PROBABILITY)
        needed = needed_draws(self.bias, variance, POWER, BIAS_THRESHOLD, DOF)
        part = SHARE_OF_WIDE if case in self.wide_cases else SHARE_OF_OTHERS
        return math.ceil(self.share * needed / (1 if case.name == BIAS_CASE else part))


@dataclass(frozen=True, slots=True)
class CaseReport:
    """What one case showed."""

    case: Case
    long: LongReport
    short: ShortReport | None
    """None of the wide pair, which has too many sequences to enumerate."""
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
            and (self.short is None or self.short.holds(THRESHOLD))
            and (self.num_draft_tokens > 0) == self.case.speculates
        )

    @property
    def num_impossible(self) -> int:
        """Tokens and sequences that came although their probability is 0."""
        return self.long.num_impossible + (0 if self.short is None else self.short.num_impossible)


@dataclass(frozen=True, slots=True)
class DistributionReport:
    """What all cases showed."""

    declared: str
    bias: float
    """Smallest bias that the case with most draws finds with the declared power."""
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
            "p token, rank",
            "p context, ratio",
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
                "-" if r.short is None else str(r.short.num_draws),
                f"{r.num_accepted / max(1, r.num_draft_tokens):.3f}",
                *(f"{p:.2g}" for p in r.long.p_values),
                f"{r.long.total_variation:.4f}",
                *(_p_values(r.short)),
                str(r.num_impossible),
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
            "bias": self.bias,
            "false_alarm": FALSE_ALARM,
            "threshold_bias_test": BIAS_THRESHOLD,
            "threshold": THRESHOLD,
            "cases": [
                {
                    "case": r.case.name,
                    "passed": r.passed,
                    "num_draws": r.long.num_draws,
                    "num_sequences": 0 if r.short is None else r.short.num_draws,
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
                        for m in (() if r.short is None else r.short.marginals)
                    ],
                    "num_impossible": r.num_impossible,
                }
                for r in self.cases
            ],
        }


def _p_values(short: ShortReport | None) -> list[str]:
    return ["-"] * len(LENGTHS) if short is None else [f"{m.p_value:.2g}" for m in short.marginals]


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
    for name, cases in (("other", options.cases), ("wide", options.wide_cases)):
        others = [options.num_draws(case) for case in cases if case.name != BIAS_CASE]
        if others:
            bias = smallest_bias(min(others), variance, POWER, THRESHOLD, DOF)
            lines.append(f"each of {len(others)} {name} cases: {min(others)} draws find {bias:.4f}")
    lines.append(
        f"and {options.num_sequences} sequences of {LENGTH} tokens a case of the small pair by "
        f"chi-square and total variation; each test at {THRESHOLD:.1e}, the whole suite at a false "
        f"alarm of {FALSE_ALARM:g}"
    )
    return "; ".join(lines)


def found_bias(options: DistributionOptions) -> float:
    """Return the smallest bias that the case with most draws finds with the power; 1 with none."""
    num_draws = max((options.num_draws(c) for c in options.cases if c.name == BIAS_CASE), default=0)
    if num_draws == 0:
        return 1.0
    variance = PROBABILITY * (1 - PROBABILITY)
    return smallest_bias(num_draws, variance, POWER, BIAS_THRESHOLD, DOF)


async def run_distribution_suite(options: DistributionOptions) -> DistributionReport:
    """Start the enumerable pairs, one after the other, and test every case."""
    declared = declaration(options)
    say(f"declared before the run: {declared}")
    progress = Progress()
    settings, k = options.settings, options.num_speculative_tokens
    reports: list[CaseReport] = []
    versions: set[str] = set()
    for spec, cases in (
        (toy_pair(settings), options.cases),
        (wide_pair(k, settings), options.wide_cases),
    ):
        if cases:
            done, tried = await _run_pair(spec, cases, options, progress)
            reports += done
            versions |= tried
    progress.close()
    return DistributionReport(
        declared, found_bias(options), tuple(reports), tuple(sorted(versions))
    )


async def _run_pair(
    spec: PairSpec, cases: Sequence[Case], options: DistributionOptions, progress: Progress
) -> tuple[list[CaseReport], set[str]]:
    async with (
        LocalPair(spec) as local,
        GenerationClient(local.orchestrators[0].address) as client,
    ):
        pair = await client.wait_ready()
        reports = [
            await _run_case(client, case, number, options, progress)
            for number, case in enumerate(cases)
        ]
    return reports, set(pair.target.versions)


async def _run_case(
    client: GenerationClient,
    case: Case,
    number: int,
    options: DistributionOptions,
    progress: Progress,
) -> CaseReport:
    is_wide = case in options.wide_cases
    top_k = int(options.settings.get("draft_sample_top_k", DEFAULT_TOP_K))
    texts = WideTexts(case, top_k) if is_wide else LongTexts(case)
    counts, drafted = Counter[tuple[int, ...]](), Counter[str]()
    jobs = _jobs(case, number, options, 0 if is_wide else options.num_sequences)
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
        None if is_wide else judge(counts, exact_law(case), LENGTHS, THRESHOLD),
        drafted["drafted"],
        drafted["accepted"],
    )


def _jobs(case: Case, number: int, options: DistributionOptions, num_sequences: int) -> list[Job]:
    """Make the requests of a case, each with a seed of its own."""
    lengths = [TEXT_LENGTH] * math.ceil(options.num_draws(case) / TEXT_LENGTH)
    lengths += [LENGTH] * num_sequences
    return [
        case.job(f"law-{number}-{index}", (number << 32) + index, length)
        for index, length in enumerate(lengths)
    ]
