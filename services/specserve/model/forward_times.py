"""How long forwards take, learned from those that ran. Knows numbers of tokens and seconds."""

from __future__ import annotations

from bisect import bisect_left

_WEIGHT = 0.2


class ForwardTimes:
    """Moving averages by the number of tokens, in powers of two."""

    def __init__(self) -> None:
        self._averages: dict[int, tuple[float, float]] = {}  # {bucket: (tokens, seconds)}
        self._points: list[tuple[float, float]] | None = None
        """These in order; None when one has changed."""

    def note(self, num_tokens: int, seconds: float) -> None:
        """Learn the time of a forward with this many tokens."""
        bucket = num_tokens.bit_length()
        old = self._averages.get(bucket)
        if old is None:
            self._averages[bucket] = (float(num_tokens), seconds)
        else:
            tokens, average = old
            self._averages[bucket] = (
                tokens + _WEIGHT * (num_tokens - tokens),
                average + _WEIGHT * (seconds - average),
            )
        self._points = None

    def expected(self, num_tokens: float) -> float:
        """Return the time of a forward: along the line between the sizes that were measured.

        Beyond them that of the nearest: a larger forward is first believed to cost no more. 0 while
        nothing was measured.
        """
        if self._points is None:
            self._points = sorted(self._averages.values())
        points = self._points
        index = bisect_left(points, (num_tokens, 0.0))
        if index == len(points):
            return points[-1][1] if points else 0.0
        high_tokens, high_s = points[index]
        if index == 0 or high_tokens == num_tokens:
            return high_s
        low_tokens, low_s = points[index - 1]
        return low_s + (high_s - low_s) * (num_tokens - low_tokens) / (high_tokens - low_tokens)
