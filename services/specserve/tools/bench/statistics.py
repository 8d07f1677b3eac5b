"""Quantiles, intervals and ratios of paired runs. Pure: numbers in, frozen values out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
"""Of every interval."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """How values are spread."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate from pairs, with its 95 % interval."""

    value: float
    low: float | None
    """None with fewer than two pairs: nothing can be told."""
    high: float | None
    count: int
    """Pairs behind it."""

    def divided_by(self, factor: float) -> Interval:
        """Return the interval of the value over a known factor."""
        return Interval(
            self.value / factor,
            None if self.low is None else self.low / factor,
            None if self.high is None else self.high / factor,
            self.count,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What one side of a pair did."""

    num_tokens: int
    seconds: float


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """Summarise values, interpolating between neighbours; None without any."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = np.quantile(array, (0.5, 0.95, 0.99)).tolist()
    return Quantiles(len(values), float(array.mean()), p50, p95, p99, float(array.max()))


def rate(work: Sequence[Work]) -> float:
    """Return tokens per second over all of it; 0 when no time passed."""
    seconds = sum(item.seconds for item in work)
    return sum(item.num_tokens for item in work) / seconds if seconds > 0 else 0.0


def ratio_of_rates(left: Sequence[Work], right: Sequence[Work]) -> Interval | None:
    """Compare two sides of the same pairs: rate of the left over rate of the right.

    The value is the ratio of the totals. Its interval is that of the logarithm: each pair's
    influence on it, linearised, and Student's t over the pairs.

    Returns:
        None when a side has no tokens or took no time.
    """
    if len(left) != len(right):
        raise ValueError(f"{len(left)} runs on the left, {len(right)} on the right")
    sides = np.array(
        [[(item.num_tokens, item.seconds) for item in side] for side in (left, right)],
        dtype=np.float64,
    ).reshape(2, -1, 2)  # [side, pair, (tokens, seconds)]
    totals = sides.sum(axis=1)  # [side, (tokens, seconds)]
    if not sides.size or not np.all(totals > 0):
        return None
    value = float(totals[0, 0] / totals[0, 1] / (totals[1, 0] / totals[1, 1]))
    count = len(left)
    if count < 2:
        return Interval(value, None, None, count)
    shares = count * sides / totals[:, None, :]  # [side, pair, 2], mean 1 over the pairs
    influence = shares[0, :, 0] - shares[0, :, 1] - shares[1, :, 0] + shares[1, :, 1]
    error = float(influence.std(ddof=1)) / math.sqrt(count)
    reach = student_quantile(0.5 + CONFIDENCE / 2, count - 1) * error
    return Interval(value, value * math.exp(-reach), value * math.exp(reach), count)


def student_quantile(probability: float, dof: int) -> float:
    """Return the quantile of Student's t, for a probability in (0.5, 1).

    Args:
        dof: degrees of freedom, 1 or more.
    """
    within = 2 * probability - 1  # P(|T| < t)
    low, high = 0.0, 1.0
    while _within(high, dof) < within:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, dof) < within else (low, middle)
    return high


def _within(t: float, dof: int) -> float:
    """P(|T| < t): the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(dof))
    cos2 = math.cos(angle) ** 2
    odd = dof % 2
    term = math.cos(angle) if odd else 1.0
    total = term if dof > 1 else 0.0
    for step in range(2 + odd, dof - 1, 2):
        term *= cos2 * (step - 1) / step
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def relative_difference(left: float, right: float) -> float:
    """Return how far two positive values lie apart, in shares of the smaller one."""
    smaller, larger = sorted((left, right))
    return larger / smaller - 1 if smaller > 0 else math.inf
