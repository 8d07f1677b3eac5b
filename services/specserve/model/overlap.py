"""Which rows to draft ahead, and when, from measured times alone.

A forward that runs while nobody waits costs nothing; what asked work waits longer for it, it costs.
Knows numbers; knows no session and no branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def num_riding_rows(
    odds: Sequence[float], num_tokens: int, num_calls: int, forward_s: Callable[[int], float]
) -> int:
    """Return how many of the likeliest rows to add to a forward that was asked for.

    Args:
        odds: of each row that could be drafted, descending.
        num_tokens: tokens of the forward without them.
        num_calls: calls that wait for it.
        forward_s: expected time of a forward with so many tokens; 0 while nothing is known.
    """
    saved_s, alone_s = forward_s(1), forward_s(num_tokens)
    best, best_gain, total = 0, 0.0, 0.0
    for count, probability in enumerate(odds, 1):
        total += probability
        gain = total * saved_s - num_calls * max(0.0, forward_s(num_tokens + count) - alone_s)
        if gain >= best_gain:
            best, best_gain = count, gain
    return best


def num_rows_worth(odds: Sequence[float], forward_s: Callable[[int], float]) -> int:
    """Return how many of the likeliest rows one forward should take: the most odds per second.

    Where rows cost nothing all of them are taken; where each costs, the unlikely ones wait.

    Args:
        odds: of each row that could be drafted, descending.
        forward_s: expected time of a forward with so many rows; 0 while nothing is known.
    """
    best, best_rate, total = 0, 0.0, 0.0
    for count, probability in enumerate(odds, 1):
        total += probability
        seconds = forward_s(count)
        if seconds <= 0.0:
            return len(odds)
        if total / seconds >= best_rate:
            best, best_rate = count, total / seconds
    return best


def expected_wait_s(due_in_s: Sequence[float], forward_s: float) -> float:
    """Return how long a session's next call will wait for a forward that starts now.

    Args:
        due_in_s: when the call may come, each as likely as the others.
        forward_s: time of the forward.
    """
    if not due_in_s:
        return 0.0
    return sum(max(0.0, forward_s - due) for due in due_in_s) / len(due_in_s)
