"""How much longer rounds take than the model of two devices says.

Draft and target may share a machine, a bus, or a queue that no model knows. What was learned of it
is forgotten after a while, for only rounds in which nearly all sessions draft can tell
whether it still holds; where a try shows that it does, the next one waits twice as long. Knows
seconds and clocks.
"""

from __future__ import annotations

from collections.abc import Callable

from specserve.speculation.step_curve import RecentMean

CROWD_WINDOW = 64
"""Rounds that crowding is averaged over: more than one of each session."""

CROWD_PRIOR = 32
"""Rounds' worth of doubt about it: until then the model stands as it is."""

CROWD_PRIOR_AGAIN = 8
"""The same where it was crowded before."""

CROWD_FORGET_S = 20.0
"""How long it is believed when no more rounds are seen, at first ..."""

CROWD_FORGET_MOST_S = 640.0
"""... and after many tries that came to nothing."""

CLEARLY_CROWDED = 1.1
"""A try in which rounds took so many times what they should came to nothing ..."""

NUM_ROUNDS_TRIED = 8
"""... once it is seen in so many of them."""


class Crowding:
    """What is known for one octave of sessions."""

    def __init__(self) -> None:
        self._ratio = RecentMean(CROWD_WINDOW)
        self._drafted = RecentMean(CROWD_WINDOW)
        """Draft tokens that came: often fewer than were asked for."""
        self._doubt = CROWD_PRIOR
        self._forget_s = CROWD_FORGET_S
        self._is_try = False
        """Something was forgotten, and whether it still holds is not known yet."""
        self._num_rounds_kept = 0
        """Rounds of all sessions since it was last tried anew."""

    def add(
        self,
        wall_s: float,
        num_draft_tokens: int,
        num_sessions: int,
        expected_s: Callable[[float], float],
        now: float,
    ) -> None:
        """Learn from a round.

        Args:
            num_draft_tokens: that came.
            expected_s: how long a round should take if so many came to every session, on average.
        """
        if self._ratio.count and now - self._ratio.updated_at > self._forget_s:
            was_crowded = self._ratio.value() > CLEARLY_CROWDED
            self._doubt = CROWD_PRIOR_AGAIN if was_crowded else CROWD_PRIOR
            # The values too: else the first round of a try would bring the old opinion back.
            self._ratio, self._drafted = RecentMean(CROWD_WINDOW), RecentMean(CROWD_WINDOW)
            self._is_try, self._num_rounds_kept = True, 0
        self._drafted.add(num_draft_tokens, now)
        # All sessions' rounds take alike: one to which few came waits for those to which many did.
        expected = expected_s(self._drafted.value())
        if expected > 0:
            self._ratio.add(wall_s / expected, now)
        if (
            self._is_try
            and self._ratio.count >= NUM_ROUNDS_TRIED
            and self._ratio.value() > CLEARLY_CROWDED
        ):
            self._is_try = False
            self._forget_s = min(2 * self._forget_s, CROWD_FORGET_MOST_S)
        self._num_rounds_kept += 1
        if self._num_rounds_kept >= CROWD_WINDOW * num_sessions:
            self._is_try, self._forget_s = False, CROWD_FORGET_S  # it stood: no mere try

    def value(self, now: float) -> float | None:
        """Return how much longer rounds take than expected; None while that is not known."""
        if now - self._ratio.updated_at > self._forget_s:
            return None
        ratio = min(max(self._ratio.value(), 0.5), 2.0)
        return (self._ratio.count * ratio + self._doubt) / (self._ratio.count + self._doubt)
