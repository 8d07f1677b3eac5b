"""Few combinations that hold every pair of values: a greedy cover, the same on every machine."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

Combination = tuple[int, ...]
"""One index per factor."""


@cache
def pairwise(sizes: tuple[int, ...]) -> list[Combination]:
    """Choose combinations until each two values of two factors stand in one of them.

    Args:
        sizes: values of each factor; at least two factors.
    """
    candidates = [
        (combination, pairs_of(combination))
        for combination in itertools.product(*map(range, sizes))
    ]
    missing = set().union(*(pairs for _, pairs in candidates))
    used: Counter[object] = Counter()
    chosen = []
    while missing:
        # Of equally good ones the one whose pairs are the rarest so far: no pair stands alone.
        best, pairs = max(
            candidates,
            key=lambda candidate: (
                len(candidate[1] & missing),
                -sum(used[pair] for pair in candidate[1]),
            ),
        )
        chosen.append(best)
        missing -= pairs
        used.update(pairs)
    return chosen


def pairs_of(combination: Combination) -> frozenset[tuple[tuple[int, int], tuple[int, int]]]:
    """Return ((factor, value), (other factor, its value)) of a combination."""
    return frozenset(itertools.combinations(enumerate(combination), 2))
