"""How long to wait, with calls at hand, for calls that are about to come. Pure: times in, time out.

m calls are here and e more expected within w; T is the time of a forward with the tokens of so
many, g the time from a session's answer to its next call. Held, all are done at w + T(m + e); not
held, the m at T(m) and the e at T(m) + T(e). In the next round all are in step, T(m + e) + g,
instead of taking turns, T(m) + max(T(e), g).

Without a hold sessions that answer a little late lock into two half-empty batches, and a prompt
that comes while the others are drafted for takes a forward to itself. Where forwards take as long
as their tokens are many, turns are as good or better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LATE = 0.1
"""Calls may come later than ever by this share of their gap: where rhythms are steady a hold that
ended on the beat would miss half of them by a hair, each for a whole forward."""


@dataclass(frozen=True, slots=True)
class Due:
    """A session that was answered and will call again."""

    waits_s: Sequence[float]
    """Until it may call, each as likely as the others; at least one."""
    gap_s: float
    """From its answers to its calls, about."""
    num_tokens: int
    """Of its call, about."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a forward can take besides the calls at hand."""

    num_calls: int
    num_tokens: int


def best_hold_s(
    num_calls: int,
    num_tokens: int,
    due: Sequence[Due],
    room: Room,
    forward_s: Callable[[float], float],
) -> float:
    """Return how long to hold; 0 to run now.

    Args:
        num_calls: here, at least one.
        num_tokens: of their forward.
        due: who else is expected.
        forward_s: time of a forward with so many tokens.
    """
    if not due:
        return 0.0
    now_s = forward_s(num_tokens)
    gap_s = sum(one.gap_s for one in due) / len(due)
    expected = sorted(
        (wait, 1 / len(one.waits_s), one.num_tokens) for one in due for wait in one.waits_s
    )
    count = tokens = best_gain = best_wait = 0.0
    for wait, share, size in expected:
        count += share
        tokens += share * size
        if count > room.num_calls or tokens > room.num_tokens:
            break
        theirs_s, together_s = forward_s(tokens), forward_s(num_tokens + tokens)
        late_s = wait + together_s - now_s
        saved_s = count * (theirs_s - late_s) - num_calls * late_s
        by_turns_s, in_step_s = now_s + max(theirs_s, gap_s), together_s + gap_s
        gain = saved_s + (num_calls + count) * max(0.0, by_turns_s - in_step_s)
        if late_s < theirs_s and gain > best_gain:
            best_gain, best_wait = gain, wait
    return best_wait
