"""Prefixes: short texts of the pair itself, after fixed prompts, against the target's own law.

Speculation must draw short texts with the frequencies that the target itself tells
(`told_law.py`). How much a machine can tell depends on how much it decodes in the time given:
that is measured, and declared, before anything that counts is drawn. Knows requests and laws.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import Generated, Job, TextClient
from specserve.tools.terminal import Progress, say, table
from specserve.tools.verify.chi_square import TAIL_FACTOR, smallest_bias
from specserve.tools.verify.short_texts import ShortReport, judge
from specserve.tools.verify.told_law import LENGTH, TOP_K, told_law

LENGTHS = (1, 2, LENGTH)
FALSE_ALARM = 1e-4
"""Odds that this part fails although nothing is wrong, shared out over its tests."""

POWER = 0.99
NUM_WARM_UP = 48
"""Texts that measure the machine, a case."""

MIN_DRAWS = 200


@dataclass(frozen=True, slots=True)
class PrefixMode:
    """One way of sampling."""

    name: str
    rule: AcceptanceRule
    has_cut: bool
    """With TOP_K; else as a request samples that asks for nothing."""


MODES = (
    PrefixMode("standard", AcceptanceRule.STANDARD, has_cut=False),
    PrefixMode(f"standard, top-k {TOP_K}", AcceptanceRule.STANDARD, has_cut=True),
    PrefixMode(f"coupled, top-k {TOP_K}", AcceptanceRule.COUPLED, has_cut=True),
)


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """What to draw."""

    seconds: float
    """Time for all draws together."""
    concurrency: int
    num_speculative_tokens: int
    """K: so many more tokens than are counted are decoded."""
    tie_margin: float
    """Gap of log-probabilities that a forward of another shape may close."""
    num_draws: int | None = None
    """Texts a case; None draws as many as the time allows."""


@dataclass(frozen=True, slots=True)
class PrefixCase:
    """One prompt, sampled in one way."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    mode: PrefixMode

    @property
    def rule(self) -> AcceptanceRule:
        """How rounds are decided."""
        return self.mode.rule

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.mode.name}, {self.prompt_id}"

    def sampling(self, seed: int) -> SamplingParams:
        """Return the parameters of one request."""
        top_k = TOP_K if self.mode.has_cut else 0
        return SamplingParams(self.rule, seed, 0, temperature=1.0, top_k=top_k)


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """What one case showed."""

    case: PrefixCase
    texts: ShortReport
    num_draft_tokens: int
    num_accepted: int
    longest_block: int
    """Most draft tokens of a round."""


@dataclass(frozen=True, slots=True)
class PrefixesReport:
    """What all cases showed."""

    declared: str
    threshold: float
    """Odds of a false alarm of each test."""
    reports: tuple[PrefixReport, ...]

    @property
    def passed(self) -> bool:
        """Every case holds."""
        return all(map(self._holds, self.reports))

    @property
    def num_texts(self) -> int:
        """Texts of the case that has the fewest."""
        return min((report.texts.num_draws for report in self.reports), default=0)

    def passed_rule(self, rule: AcceptanceRule) -> bool:
        """Every case of one rule holds."""
        return all(self._holds(report) for report in self.reports if report.case.rule is rule)

    def longest_block(self, rule: AcceptanceRule) -> int:
        """Most draft tokens of a round of one rule; 0 for a rule without a case."""
        return max((r.longest_block for r in self.reports if r.case.rule is rule), default=0)

    def _holds(self, report: PrefixReport) -> bool:
        """No test speaks against the law, and the texts were drafted."""
        return report.texts.holds(self.threshold) and report.num_draft_tokens > 0

    def table(self) -> str:
        """Lay the report out for people."""
        header = (
            "case",
            "texts",
            "accepted",
            *(f"p first {length}" for length in LENGTHS),
            *(f"TV first {length}" for length in LENGTHS),
            "impossible",
            "",
        )
        rows = [
            (
                r.case.name,
                str(r.texts.num_draws),
                f"{r.num_accepted / max(1, r.num_draft_tokens):.3f}",
                *(f"{m.p_value:.2g}" for m in r.texts.marginals),
                *(f"{m.total_variation:.3f}/{m.tolerance:.3f}" for m in r.texts.marginals),
                str(r.texts.num_impossible),
                "ok" if self._holds(r) else "FAILED",
            )
            for r in self.reports
        ]
        return table(header, rows)

    def record(self) -> dict[str, object]:
        """Give the report as JSON values."""
        return {
            "suite": "prefixes",
            "passed": self.passed,
            "declared": self.declared,
            "false_alarm": FALSE_ALARM,
            "threshold": self.threshold,
            "cases": [
                {
                    "case": r.case.name,
                    "passed": self._holds(r),
                    "num_sequences": r.texts.num_draws,
                    "num_draft_tokens": r.num_draft_tokens,
                    "acceptance_rate": r.num_accepted / max(1, r.num_draft_tokens),
                    "longest_block": r.longest_block,
                    "sequences": [
                        {
                            "length": m.length,
                            "p_value": m.p_value,
                            "total_variation": m.total_variation,
                            "tolerance": m.tolerance,
                        }
                        for m in r.texts.marginals
                    ],
                    "num_impossible": r.texts.num_impossible,
                }
                for r in self.reports
            ],
        }


async def run_prefix_suite(
    client: TextClient,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    options: PrefixOptions,
    progress: Progress,
) -> PrefixesReport:
    """Test a running pair after each prompt, (name, token ids), in every way of sampling."""
    cases = [PrefixCase(name, ids, mode) for name, ids in prompts for mode in MODES]
    threshold = FALSE_ALARM / (2 * len(LENGTHS) * len(cases)) / TAIL_FACTOR
    laws = [
        await told_law(
            client,
            case.prompt_token_ids,
            options.tie_margin,
            options.concurrency,
            case.name,
            has_cut=case.mode.has_cut,
        )
        for case in cases
    ]
    num_draws = options.num_draws
    if num_draws is None:
        num_draws = await _affordable_draws(client, cases, options)
    declared = declaration(num_draws, len(cases), threshold)
    say(f"declared before the run: {declared}")
    reports = []
    for number, (case, law) in enumerate(zip(cases, laws, strict=True)):
        done = await _draw(client, _jobs(case, number, num_draws, options), options, progress, case)
        reports.append(
            PrefixReport(
                case,
                judge(
                    Counter(law.cell_of(g.token_ids) for g in done), law.probs, LENGTHS, threshold
                ),
                sum(g.record.num_draft_tokens for g in done),
                sum(g.record.num_accepted_draft_tokens for g in done),
                max((drafted for g in done for drafted in g.record.per_step_drafted), default=0),
            )
        )
    return PrefixesReport(declared, threshold, tuple(reports))


def declaration(num_draws: int, num_cases: int, threshold: float) -> str:
    """Say what so many draws can tell, and what they cannot."""
    dof = TOP_K - 1
    bias = smallest_bias(num_draws, 0.25, POWER, threshold, dof)
    return (
        f"{num_draws} texts a case ({num_cases} cases), the {TOP_K} most likely tokens told apart; "
        f"chi-square and total variation over the first {', '.join(map(str, LENGTHS))} tokens, "
        f"each test at {threshold:.1e} (false alarm of the part {FALSE_ALARM:g}); on this machine "
        f"in this time that finds, with power {POWER:g}, a bias of {bias:.3f} in a token of "
        f"probability 0.5, and none much smaller: the enumerable pair is for those"
    )


async def _affordable_draws(
    client: TextClient, cases: Sequence[PrefixCase], options: PrefixOptions
) -> int:
    """Measure how many texts a case the time allows."""
    jobs = [
        job
        for number, case in enumerate(cases)
        for job in _jobs(case, len(cases) + number, NUM_WARM_UP, options)
    ]
    began = time.perf_counter()
    await client.generate_all(jobs, options.concurrency)
    rate = len(jobs) / (time.perf_counter() - began)
    return max(MIN_DRAWS, math.floor(rate * options.seconds / len(cases)))


async def _draw(
    client: TextClient,
    jobs: Sequence[Job],
    options: PrefixOptions,
    progress: Progress,
    case: PrefixCase,
) -> list[Generated]:
    done: list[Generated] = []

    def take(_: Job, generated: Generated) -> None:
        done.append(generated)
        progress(case.name, len(done) / len(jobs))

    await client.generate_each(jobs, options.concurrency, take)
    return done


def _jobs(case: PrefixCase, number: int, num_draws: int, options: PrefixOptions) -> list[Job]:
    # The first token comes with the prompt; a whole round of K + 1 may follow before the last that
    # is counted.
    length = LENGTH + options.num_speculative_tokens
    return [
        Job(
            f"prefix-{number}-{index}",
            case.prompt_token_ids,
            case.sampling(seed=(number << 32) + index),
            length,
            ignore_eos=True,
        )
        for index in range(num_draws)
    ]
