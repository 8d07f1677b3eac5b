"""How long forwards take, learned from those that ran. Knows numbers of tokens and seconds."""

from __future__ import annotations

_WEIGHT = 0.2


class ForwardTimes:
    """Moving averages by the number of tokens, in powers of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._nearest: dict[int, int] = {}  # {bucket: the measured one that is most like it}

    def note(self, num_tokens: int, seconds: float) -> None:
        """Learn the time of a forward with this many tokens."""
        bucket = num_tokens.bit_length()
        old = self._seconds.get(bucket)
        if old is None:
            self._nearest.clear()
        self._seconds[bucket] = seconds if old is None else old + _WEIGHT * (seconds - old)

    def nearest(self, num_tokens: int) -> float:
        """Return the time of the most like forward that was measured; 0 while none was.

        Of two it is the smaller one: a larger forward is first believed to cost no more.
        """
        if not self._seconds:
            return 0.0
        wanted = num_tokens.bit_length()
        if wanted not in self._nearest:
            smaller = [bucket for bucket in self._seconds if bucket <= wanted]
            self._nearest[wanted] = max(smaller) if smaller else min(self._seconds)
        return self._seconds[self._nearest[wanted]]
