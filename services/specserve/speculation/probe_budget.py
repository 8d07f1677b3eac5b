"""The time that looking at other choices may lose, shared by all requests of a pool.

Knows seconds of sessions; knows no choice. Clocks are handed in.
"""

from __future__ import annotations

PROBE_SHARE = 0.005
"""Most time that probing may lose, of the time of all sessions together."""

SAVINGS_S = 60.0
"""Probing saves up at most what this long a time allows; a dearer probe waits for no more."""

LONGEST_PAUSE_S = 2.0
"""Where nobody has decided for longer, nobody was there of whose time a share might be lost."""


class ProbeBudget:
    """Session time that may be lost: it grows with the clock and shrinks with every probe."""

    def __init__(self, now: float) -> None:
        self.plain_asked_at = now
        """When decode-ahead was last asked for in order to measure it: one request is enough."""
        self._credit_s = 0.0
        self._at = now

    @property
    def credit_s(self) -> float:
        """Session seconds that may be lost at present; below 0 after a probe that lost more."""
        return self._credit_s

    def begin(self, now: float) -> None:
        """Hear of the first request after none: what passed until now was nobody's time."""
        self._at = now

    def accrue(self, num_sessions: int, now: float) -> None:
        """Save a share of the time that has passed, of every session."""
        passed_s = min(max(0.0, now - self._at), LONGEST_PAUSE_S)
        earned = PROBE_SHARE * num_sessions * passed_s
        self._credit_s = min(self._credit_s + earned, _most(num_sessions))
        self._at = now

    def wait_s(self, loss_s: float, num_sessions: int) -> float:
        """Return how long it takes until so much may be lost; 0 if it may be now."""
        missing = min(loss_s, _most(num_sessions)) - self._credit_s
        return max(0.0, missing) / (PROBE_SHARE * num_sessions)

    def spend(self, loss_s: float) -> None:
        """Take what a probe has lost; less than 0 was gained, and gives nothing back."""
        self._credit_s -= max(0.0, loss_s)


def _most(num_sessions: int) -> float:
    return PROBE_SHARE * num_sessions * SAVINGS_S
