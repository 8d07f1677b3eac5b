"""How much drafting targets could use if it took no time: what a pool of drafts is sized by.

Measured at what drafts do now, a slow draft would be used less, be given less, and vanish. Knows
options; knows no pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.speculation.length_choice import Option, best_of

MIN_GAIN = 1.05
"""A draft that takes no time must be worth this much; else none is wanted."""

GOOD_ENOUGH = 0.98
"""The fewest draft tokens with this share of the best rate are those that are demanded."""


def fast_draft_length(options: Sequence[Option]) -> int:
    """Return the K that would be chosen with a draft that takes no time; 0 where it gains nothing.

    Args:
        options: [max_k + 1] by their costs with such a draft, K = 0 first.
    """
    best = options[best_of(options)].rate
    if best < MIN_GAIN * options[0].rate:
        return 0
    return next(k for k, option in enumerate(options) if option.rate >= GOOD_ENOUGH * best)
