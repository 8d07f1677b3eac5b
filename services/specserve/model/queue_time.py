"""How long calls wait for their first forward. Knows times; knows no call and no batch."""

from __future__ import annotations

_WEIGHT = 0.2
"""Of the newest wait in the mean of the last ones."""


class QueueTime:
    """The waits of one engine's calls."""

    def __init__(self) -> None:
        self._mean_s = 0.0

    def note(self, waited_s: float) -> None:
        """Take in the wait of a call whose first forward begins."""
        self._mean_s += _WEIGHT * (waited_s - self._mean_s)

    def seconds(self, waiting_since: float | None, now: float) -> float:
        """Return the mean of the last waits, or how long the oldest call waits now if that is more.

        Args:
            waiting_since: when the oldest call came that waits; None when none does.
        """
        if waiting_since is None:
            return self._mean_s
        return max(self._mean_s, now - waiting_since)
