"""How far a draft that cannot keep up lowers K, before its queue holds targets up.

A proposal that waits as long as the target's own step takes is worth less than it costs: the wait
grows with the tokens that all sessions ask for, so each asks for fewer. Knows seconds and counts.
"""

from __future__ import annotations

LEAST_WAITING = 4
"""With fewer calls waiting at a draft there is no queue to speak of."""

LEAST_QUEUE_S = 0.02
"""Shorter waits are a forward or the event loop, not pressure."""


class PressedLength:
    """One request's K under its draft's queue: cut at once, raised by one a round."""

    def __init__(self) -> None:
        self._limit: int | None = None
        """Most draft tokens at present; None without pressure."""

    def length(self, k: int, *, queue_s: float, num_waiting: int, step_s: float) -> int:
        """Return the K of the next round, 0 to k.

        Args:
            queue_s: how long calls wait at the draft.
            num_waiting: calls that wait there.
            step_s: the target's forward; 0 while that is not known.
        """
        if num_waiting >= LEAST_WAITING and step_s > 0 and queue_s > max(step_s, LEAST_QUEUE_S):
            limit = int(k * step_s / queue_s)
            self._limit = limit if self._limit is None else min(limit, self._limit)
        elif self._limit is not None:
            # Not all at once: those that left the queue together would come back together.
            self._limit = None if self._limit + 1 >= k else self._limit + 1
        return k if self._limit is None else min(k, self._limit)
