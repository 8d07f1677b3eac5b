"""Distribution: sequences through the real gRPC path against the exact law of an enumerable pair.

The toy's logits are a pure function of its context, so the probability of every sequence is known.
Each case draws `num_draws` sequences with seeds of their own and compares the counts with that law
by chi-square, on the first token, the first two, and the whole sequence (rejection and redraw lie
inside). What can be found, and the odds of a false alarm, are declared before anything is drawn.
Knows laws and counts; the services are plain processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch

from specserve.config import SpeculativeMethod
from specserve.model.toy import ToySpec, toy_logits
from specserve.speculation.constraints import ConstraintState, TokenConstraints
from specserve.speculation.digest import TokenChain
from specserve.speculation.row_edits import RowEdits, edit_row
from specserve.speculation.transforms import transform
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import GenerationClient, Job
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.terminal import Progress, say, table

TARGET = "toy:vocab_size=4,seed=11,order=1,sharpness=1.0"
DRAFT = "toy:vocab_size=4,seed=11,order=1,sharpness=1.0,noise=0.8,noise_seed=3"
PROMPT = (1, 3, 2, 1, 2, 3, 3, 1, 1, 2)
"""Tokens follow one another in more than one way, so that lookups have something to guess."""
LENGTH = 4
"""Tokens per sequence."""

FALSE_ALARM = 1e-4
"""Odds that the whole suite fails although nothing is wrong (shared out over its tests)."""

POWER = 0.99
MIN_EXPECTED = 10.0
"""Cells with fewer expected draws are merged: chi-square is no law below that."""

BATCH = 2_000


@dataclass(frozen=True, slots=True)
class LawOptions:
    """How much to draw."""

    num_draws: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Case:
    """One way of sampling."""

    name: str
    rule: AcceptanceRule
    num_speculative_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    method: SpeculativeMethod = "draft_model"
    constraints: TokenConstraints | None = None


CONSTRAINTS = TokenConstraints(
    prompt_length=len(PROMPT),
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.5,
    logit_bias=((2, 0.5),),
    bad_words=((1, 3),),
)
"""Each changes inside a block, or with what was committed just before it."""

CASES = (
    Case("target-only", AcceptanceRule.STANDARD, 0),
    Case("standard K=1", AcceptanceRule.STANDARD, 1),
    Case("standard K=3", AcceptanceRule.STANDARD, 3),
    Case("standard K=3, T=0.7, top-p 0.9", AcceptanceRule.STANDARD, 3, 0.7, 0, 0.9),
    Case("standard K=3, top-k 2", AcceptanceRule.STANDARD, 3, 1.0, 2),
    Case("coupled K=3", AcceptanceRule.COUPLED, 3),
    Case("standard K=3, penalties and bans", AcceptanceRule.STANDARD, 3, constraints=CONSTRAINTS),
    Case("standard K=3, ngram", AcceptanceRule.STANDARD, 3, method="ngram"),
    Case("standard K=3, suffix", AcceptanceRule.STANDARD, 3, method="suffix"),
    Case("standard K=3, cascade", AcceptanceRule.STANDARD, 3, method="cascade"),
)


@dataclass(frozen=True, slots=True)
class CaseReport:
    """What one case showed."""

    case: str
    num_draws: int
    acceptance_rate: float
    num_draft_tokens: int
    p_values: tuple[float, ...]
    """For the first token, the first two, the whole sequence."""
    total_variation: float
    """Of the first token: half the summed difference of frequencies and law."""
    num_impossible: int
    """Sequences drawn that the law gives probability 0."""


@dataclass(frozen=True, slots=True)
class LawReport:
    """What all cases showed."""

    cases: tuple[CaseReport, ...]

    @property
    def threshold(self) -> float:
        """p-value below which a test fails: the false alarm shared over all tests."""
        return FALSE_ALARM / (3 * len(CASES))

    @property
    def passed(self) -> bool:
        """No test below the threshold, nothing impossible, and drafting where there should be."""
        return all(
            min(report.p_values) >= self.threshold
            and report.num_impossible == 0
            and (report.num_draft_tokens > 0) == (case.num_speculative_tokens > 0)
            for case, report in zip(CASES, self.cases, strict=True)
        )

    def table(self) -> str:
        """Lay the report out for people."""
        header = ("case", "draws", "acceptance", "TV first", "p first", "p two", "p whole")
        rows = [
            (
                r.case,
                str(r.num_draws),
                f"{r.acceptance_rate:.3f}",
                f"{r.total_variation:.4f}",
                *(f"{p:.4f}" for p in r.p_values),
            )
            for r in self.cases
        ]
        return table(header, rows)

    def record(self) -> dict[str, object]:
        """Give the report as JSON values."""
        return {
            "suite": "distribution",
            "passed": self.passed,
            "false_alarm": FALSE_ALARM,
            "threshold": self.threshold,
            "cases": [
                {
                    "case": r.case,
                    "num_draws": r.num_draws,
                    "acceptance_rate": r.acceptance_rate,
                    "total_variation": r.total_variation,
                    "p_values": list(r.p_values),
                    "num_impossible": r.num_impossible,
                }
                for r in self.cases
            ],
        }


def exact_law(spec: ToySpec, case: Case) -> dict[tuple[int, ...], float]:
    """Enumerate the probability of every sequence of LENGTH tokens after PROMPT."""
    params = _sampling(case, seed=0)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, probability in law.items():
            text = (*PROMPT, *prefix)
            logits = toy_logits(spec, text)
            if case.constraints is not None:
                state = ConstraintState(case.constraints)
                state.follow(TokenChain(text), len(text))
                logits = edit_row(logits, state.edits() or RowEdits())
            step = transform(logits, params)
            for token_id, p in zip(step.token_ids.tolist(), step.probs.tolist(), strict=True):
                longer[(*prefix, token_id)] = probability * p
        law = longer
    return law


def chi_square_p(counts: Sequence[float], expected: Sequence[float]) -> float:
    """p-value of counts under expected ones, small cells merged into one.

    Returns:
        1.0 when fewer than two cells are left: nothing can be told.
    """
    small = [i for i, e in enumerate(expected) if e < MIN_EXPECTED]
    cells = [(counts[i], e) for i, e in enumerate(expected) if e >= MIN_EXPECTED]
    rest = (sum(counts[i] for i in small), sum(expected[i] for i in small))
    if rest[1] >= MIN_EXPECTED or (rest[1] > 0 and not cells):
        cells.append(rest)
    elif rest[1] > 0:
        last = cells.pop()
        cells.append((last[0] + rest[0], last[1] + rest[1]))
    if len(cells) < 2:
        return 1.0
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    dof = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(dof, half))


def smallest_bias(p: float, num_draws: int, threshold: float) -> float:
    """Smallest shift of a probability p that is found with POWER at the given threshold."""
    normal = NormalDist()
    z = normal.inv_cdf(1 - threshold / 2) + normal.inv_cdf(POWER)
    return z * math.sqrt(p * (1 - p) / num_draws)


async def run_law_suite(options: LawOptions) -> LawReport:
    """Start the enumerable pair and test every case."""
    threshold = FALSE_ALARM / (3 * len(CASES))
    bias = smallest_bias(0.5, options.num_draws, threshold)
    say(
        f"declared before the run: {options.num_draws} sequences of {LENGTH} tokens a case, "
        f"{3 * len(CASES)} chi-square tests, each at {threshold:.1e} "
        f"(false alarm of the suite {FALSE_ALARM:g}); a shift of {bias:.4f} in a first-token "
        f"probability near 0.5 is found with power {POWER}"
    )
    progress = Progress()
    spec = PairSpec(
        target=TARGET,
        draft=DRAFT,
        num_gateways=0,
        # A match of two tokens is long in four-token texts: the cascade then uses both.
        speculative_config='{"num_speculative_tokens": 3, "cascade_min_match_length": 2}',
    )
    async with (
        LocalPair(spec) as local,
        GenerationClient(local.orchestrators[0].address) as client,
    ):
        await client.wait_ready()
        reports = []
        for index, case in enumerate(CASES):
            counts: Counter[tuple[int, ...]] = Counter()
            drafted = accepted = 0
            for first, jobs in _batches(case, index, options.num_draws):
                for done in await client.generate_all(jobs, options.concurrency):
                    counts[done.token_ids] += 1
                    drafted += done.record.num_draft_tokens
                    accepted += done.record.num_accepted_draft_tokens
                progress(case.name, (first + len(jobs)) / options.num_draws)
            reports.append(_judge(case, counts, options.num_draws, drafted, accepted))
    progress.close()
    return LawReport(tuple(reports))


def _sampling(case: Case, seed: int) -> SamplingParams:
    return SamplingParams(
        rule=case.rule,
        seed=seed,
        choice=0,
        temperature=case.temperature,
        top_k=case.top_k,
        top_p=case.top_p,
        constraints=case.constraints,
    )


def _batches(case: Case, index: int, num_draws: int) -> Iterator[tuple[int, list[Job]]]:
    for first in range(0, num_draws, BATCH):
        numbers = range(first, min(first + BATCH, num_draws))
        yield (
            first,
            [
                Job(
                    f"law-{index}-{number}",
                    PROMPT,
                    _sampling(case, seed=(index << 32) + number),
                    LENGTH,
                    case.num_speculative_tokens,
                    ignore_eos=True,
                    method=case.method,
                )
                for number in numbers
            ],
        )


def _judge(
    case: Case, counts: Counter[tuple[int, ...]], num_draws: int, drafted: int, accepted: int
) -> CaseReport:
    law = exact_law(ToySpec.parse(TARGET), case)
    p_values = []
    for length in (1, 2, LENGTH):
        observed = _marginal(counts, length)
        expected = _marginal(law, length)
        keys = sorted(expected)
        p_values.append(
            chi_square_p(
                [observed.get(key, 0.0) for key in keys],
                [num_draws * expected[key] for key in keys],
            )
        )
    first, exact = _marginal(counts, 1), _marginal(law, 1)
    variation = 0.5 * sum(
        abs(first.get(key, 0.0) / num_draws - exact.get(key, 0.0)) for key in {*first, *exact}
    )
    return CaseReport(
        case.name,
        num_draws,
        accepted / max(1, drafted),
        drafted,
        tuple(p_values),
        float(np.round(variation, 6)),
        sum(n for sequence, n in counts.items() if sequence not in law),
    )


def _marginal(
    law: Counter[tuple[int, ...]] | dict[tuple[int, ...], float], length: int
) -> dict[tuple[int, ...], float]:
    marginal: dict[tuple[int, ...], float] = {}
    for sequence, weight in law.items():
        key = sequence[:length]
        marginal[key] = marginal.get(key, 0.0) + weight
    return marginal
