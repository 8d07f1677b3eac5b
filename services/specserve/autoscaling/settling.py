"""From what the load asks for to what a pool gets: bounds, delays, and no swinging.

Up: as soon as more was wanted for the upscale delay, to what is wanted now. Down: to the most that
was wanted, with some margin, at any time within the downscale delay, or within several of them when
the last change was upwards; so a dip, or a peak that has just passed, takes nothing away. Pure: the
state is a value, times come in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

DOWN_MARGIN = 0.85
"""Fewer replicas must each have this share of their aim or less: else one more would be wanted
again at once."""

TURN_DELAYS = 6
"""Downscale delays that the most wanted is looked for in, for a step down after a step up."""

MAX_GROWTH = 2
"""At most so many times the replicas there are, at once: starting is not free, and reports are
some seconds old."""

NUM_BUCKETS = 30
"""Parts that the downscale delay is remembered in."""

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may become of one pool."""

    min_replicas: int
    max_replicas: int
    upscale_delay_s: float
    downscale_delay_s: float


@dataclass(frozen=True, slots=True)
class Settled:
    """What is remembered of one pool between two looks."""

    more_since: float | None = None
    """Since when more is wanted than there is; None when it is not."""
    peaks: tuple[tuple[float, int], ...] = ()
    """(begin of a part of the downscale delay, most that was wanted in it), the oldest first."""
    changed_at: float = -math.inf
    """When the number was changed last: what came of it shows in later loads only."""
    went_up: bool = False
    """Whether that made it more."""
    began_at: float | None = None
    """When the first look was."""


def settle(
    state: Settled, wanted: float, current: int, bounds: Bounds, now: float
) -> tuple[int, Settled]:
    """Return how many replicas there shall be, and what to remember.

    Args:
        wanted: what the load asks for, a share of a replica included.
        current: replicas that were asked for last.
        now: seconds, of a clock that never goes back.
    """
    up = max(0, math.ceil(wanted - ROUNDING))
    down = max(0, math.ceil(wanted / DOWN_MARGIN - ROUNDING))
    state = _remember(state, max(up, down), bounds, now)
    low, high = bounds.min_replicas, bounds.max_replicas
    if up > current:
        since = now if state.more_since is None else state.more_since
        if now - since < bounds.upscale_delay_s:
            return _within(current, low, high), replace(state, more_since=since)
        number = _within(min(up, max(1, MAX_GROWTH * current)), low, high)
        state = replace(state, more_since=None)
        if number > current:
            state = replace(state, changed_at=now, went_up=True)
        return number, state
    state = replace(state, more_since=None)
    horizon_s = bounds.downscale_delay_s * (TURN_DELAYS if state.went_up else 1)
    began_at = now if state.began_at is None else state.began_at
    if now - max(began_at, state.changed_at) < horizon_s:
        return _within(current, low, high), state
    width = bounds.downscale_delay_s / NUM_BUCKETS
    peak = max(most for begin, most in state.peaks if begin + width >= now - horizon_s)
    number = _within(min(current, peak), low, high)
    if number < current:
        state = replace(state, changed_at=now, went_up=False)
    return number, state


def _remember(state: Settled, most: int, bounds: Bounds, now: float) -> Settled:
    width = bounds.downscale_delay_s / NUM_BUCKETS
    oldest = now - TURN_DELAYS * bounds.downscale_delay_s
    kept = tuple(item for item in state.peaks if item[0] + width >= oldest)
    if kept and now - kept[-1][0] < width:
        begin, before = kept[-1]
        kept = (*kept[:-1], (begin, max(before, most)))
    else:
        kept = (*kept, (now, most))
    began_at = now if state.began_at is None else state.began_at
    return replace(state, peaks=kept, began_at=began_at)


def _within(number: int, low: int, high: int) -> int:
    return min(max(number, low), high)
