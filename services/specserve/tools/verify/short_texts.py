"""Short texts of the enumerable pair against the law of whole sequences.

The probability of every sequence is known, so their counts are compared with it by chi-square and
total variation, on the first token, the first two, and the whole (rejection and redraw lie inside).
Knows laws and counts; knows no service.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specserve.tools.verify.chi_square import chi_square_p, variation_tolerance
from specserve.tools.verify.toy_cases import PROMPT, SPEC, Case, next_token_law

LENGTH = 4
"""Tokens per sequence."""

Law = dict[tuple[int, ...], float]


@dataclass(frozen=True, slots=True)
class Marginal:
    """The first tokens of all sequences."""

    length: int
    p_value: float
    total_variation: float
    """Half the summed difference of frequencies and law."""
    tolerance: float
    """What the total variation may be."""

    def holds(self, threshold: float) -> bool:
        """Whether neither test speaks against the law."""
        return self.p_value >= threshold and self.total_variation <= self.tolerance


@dataclass(frozen=True, slots=True)
class ShortReport:
    """What the counts of sequences showed."""

    num_draws: int
    marginals: tuple[Marginal, ...]
    num_impossible: int
    """Sequences drawn that the law gives probability 0."""

    def holds(self, threshold: float) -> bool:
        """Whether no test speaks against the law."""
        return self.num_impossible == 0 and all(m.holds(threshold) for m in self.marginals)


def exact_law(case: Case) -> Law:
    """Enumerate the probability of every sequence of LENGTH tokens after PROMPT."""
    law: Law = {(): 1.0}
    for _ in range(LENGTH):
        longer: Law = {}
        for prefix, probability in law.items():
            step = next_token_law(case, (*PROMPT, *prefix))
            for token_id in range(SPEC.vocab_size):
                if step[token_id] > 0.0:
                    longer[(*prefix, token_id)] = probability * float(step[token_id])
        law = longer
    return law


def judge(
    counts: Counter[tuple[int, ...]], law: Law, lengths: Sequence[int], threshold: float
) -> ShortReport:
    """Compare counts of sequences with their law.

    Args:
        lengths: of the marginals.
        threshold: odds of a false alarm of each test.
    """
    num_draws = counts.total()
    marginals = []
    for length in lengths:
        observed, expected = marginal(counts, length), marginal(law, length)
        keys = sorted(expected)
        marginals.append(
            Marginal(
                length,
                chi_square_p(
                    [observed.get(key, 0.0) for key in keys],
                    [num_draws * expected[key] for key in keys],
                ),
                0.5
                * sum(
                    abs(observed.get(key, 0.0) / num_draws - expected.get(key, 0.0))
                    for key in {*observed, *expected}
                ),
                variation_tolerance(list(expected.values()), num_draws, threshold),
            )
        )
    impossible = sum(n for sequence, n in counts.items() if law.get(sequence, 0.0) == 0.0)
    return ShortReport(num_draws, tuple(marginals), impossible)


def marginal(weights: Mapping[tuple[int, ...], float], length: int) -> Law:
    """Add up the weights of sequences with the same first tokens."""
    sums: Law = {}
    for sequence, weight in weights.items():
        key = sequence[:length]
        sums[key] = sums.get(key, 0.0) + weight
    return sums
