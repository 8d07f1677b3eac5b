"""Chi-square tests: p-values, critical values, power, and how much must be drawn.

Knows counts and distributions; knows no token and no service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

MIN_EXPECTED = 25.0
"""Cells with fewer expected draws are merged: far in its tail chi-square is no law below that."""

TAIL_FACTOR = 30.0
"""How much likelier than chi-square says it is that cells of MIN_EXPECTED draws exceed a critical
value: counts are skewed. Thresholds are smaller by it, so that declared odds are kept."""


def p_value(statistic: float, dof: int) -> float:
    """Return P(chi-square with `dof` degrees of freedom > statistic); 1.0 without any."""
    if dof < 1:
        return 1.0
    return float(torch.special.gammaincc(_tensor(dof / 2), _tensor(statistic / 2)))


def critical_value(odds: float, dof: int) -> float:
    """Return the statistic that is exceeded with these odds when the law holds."""
    return _solve(lambda statistic: p_value(statistic, dof) < odds)


def power(noncentrality: float, odds: float, dof: int) -> float:
    """Return the odds that a test at `odds` fails when the statistic is shifted so far.

    A noncentral chi-square is a Poisson mixture of central ones.
    """
    critical, mean = critical_value(odds, dof), noncentrality / 2
    num_terms = int(mean + 12 * math.sqrt(mean + 1) + 20)
    terms = torch.arange(num_terms, dtype=torch.float64)
    log_weights = terms * math.log(mean) - mean - torch.lgamma(terms + 1) if mean > 0 else None
    weights = torch.ones(1, dtype=torch.float64) if log_weights is None else log_weights.exp()
    tails = torch.special.gammaincc(dof / 2 + terms[: len(weights)], _tensor(critical / 2))
    return float((weights * tails).sum())


def needed_noncentrality(wanted_power: float, odds: float, dof: int) -> float:
    """Return the smallest shift that a test at `odds` finds with the wanted power."""
    return _solve(lambda shift: power(shift, odds, dof) > wanted_power)


def needed_draws(bias: float, variance: float, wanted_power: float, odds: float, dof: int) -> int:
    """Return how many draws find a bias of one token's probability.

    Args:
        bias: what is added to the probability, taken from the others in proportion.
        variance: p (1 - p) of that token.
    """
    # Pearson's statistic is shifted by n * bias^2 / (p (1 - p)): no other way to take the bias from
    # the other tokens shifts it less.
    return math.ceil(needed_noncentrality(wanted_power, odds, dof) * variance / bias**2)


def smallest_bias(
    num_draws: int, variance: float, wanted_power: float, odds: float, dof: int
) -> float:
    """Return the bias that so many draws find: the inverse of `needed_draws`."""
    return math.sqrt(needed_noncentrality(wanted_power, odds, dof) * variance / num_draws)


def chi_square_p(
    counts: Sequence[float], expected: Sequence[float], least: float = MIN_EXPECTED
) -> float:
    """p-value of counts under expected ones, cells that expect less than `least` merged into one.

    Returns:
        1.0 when fewer than two cells are left: nothing can be told.
    """
    small = [i for i, e in enumerate(expected) if e < least]
    cells = [(counts[i], e) for i, e in enumerate(expected) if e >= least]
    rest = (sum(counts[i] for i in small), sum(expected[i] for i in small))
    if rest[1] >= least or (rest[1] > 0 and not cells):
        cells.append(rest)
    elif rest[1] > 0:
        last = cells.pop()
        cells.append((last[0] + rest[0], last[1] + rest[1]))
    if len(cells) < 2:
        return 1.0
    return p_value(sum((n - e) ** 2 / e for n, e in cells), len(cells) - 1)


def variation_tolerance(probs: Sequence[float], num_draws: int, odds: float) -> float:
    """Return what the total variation of counts exceeds with at most these odds.

    Its mean is at most half the summed standard deviations of the frequencies, and one draw moves
    it by 1/n at most (McDiarmid's inequality).
    """
    mean = 0.5 * sum(math.sqrt(p * (1 - p) / num_draws) for p in probs)
    return mean + math.sqrt(-math.log(odds) / (2 * num_draws))


def _solve(is_above: Callable[[float], bool]) -> float:
    """Return where a condition that is false from 0 on begins to hold."""
    low, high = 0.0, 1.0
    while not is_above(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high


def _tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
