"""How long one forward takes, as a function of its rows, learned from what was measured.

Knows rows, seconds and the times they came in; knows no model and no request. Clocks are handed in.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

WINDOW = 16
"""Latest measurements that a mean is taken over."""

RECENT_S = 30.0
"""Measurements that are this much older than the newest are left out, the last few apart."""

FORGET_S = 300.0
"""A batch size not met for this long is forgotten: what was slow once is then tried again."""

FEW = 3
"""A batch size measured fewer times than this counts in part; the other sizes say the rest."""

EXACT_ROWS = 16
"""Up to here every number of rows is a bin of its own; above, an octave has eight."""

SLOPE_BINS = 4
"""Bins at the end of the curve that give its slope beyond the end."""

NOISE = 0.02
"""Share of a forward's time that a slope must explain before it is believed."""


class RecentMean:
    """Mean of the latest measurements without the extreme ones: one pause moves nothing."""

    __slots__ = ("_mean", "_values")

    def __init__(self, window: int = WINDOW) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=window)  # (time, value)
        self._mean: float | None = None
        """Of these values; None until somebody asks."""

    @property
    def updated_at(self) -> float:
        """When the newest measurement came; minus infinity before the first."""
        return self._values[-1][0] if self._values else -math.inf

    def add(self, value: float, now: float) -> None:
        """Take a measurement."""
        self._values.append((now, value))
        self._mean = None

    @property
    def count(self) -> int:
        """Measurements in the window."""
        return len(self._values)

    def value(self, default: float = 0.0) -> float:
        """Return the mean without the highest and lowest eighth (at least one each), if any."""
        if not self._values:
            return default
        if self._mean is None:
            self._mean = self._work_out()
        return self._mean

    def _work_out(self) -> float:
        kept = list(self._values)  # metrics are read in another thread
        since = kept[-1][0] - RECENT_S
        first = max(0, len(kept) - FEW)
        values = sorted(value for n, (at, value) in enumerate(kept) if at >= since or n >= first)
        count = len(values)
        if count <= 2:
            # Of two the lower: a pause is slow, nothing is ever wrongly fast.
            return values[0]
        cut = max(1, count // 8)
        return sum(values[cut : count - cut]) / (count - 2 * cut)


class _Bin:
    __slots__ = ("rows", "seconds")

    def __init__(self) -> None:
        self.rows = RecentMean()
        self.seconds = RecentMean()


@dataclass(frozen=True, slots=True)
class _Point:
    rows: float
    seconds: float
    count: int


class StepCurve:
    """Seconds of a forward by its rows: measured where it can be, else along the line.

    Between two measured sizes the line joins them. Beyond the ends it goes on with the slope found
    there, never below 0 and never above proportional to the rows: a forward that read its weights
    for more rows cannot cost more than that.
    """

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}  # {bin of rows: measurements}
        self._points: list[_Point] = []
        self._rows: list[float] = []
        self._latest: deque[tuple[int, float]] = deque(maxlen=8)

    @property
    def is_empty(self) -> bool:
        """Nothing was measured yet."""
        return not self._bins

    def add(self, rows: int, seconds: float, now: float) -> None:
        """Take one forward. Several calls of one forward may each report it: it counts once."""
        if rows < 1 or seconds < 0:
            return
        for other_rows, other_s in self._latest:
            if other_rows == rows and -1e-9 <= other_s - seconds <= 1e-9:
                return
        self._latest.append((rows, seconds))
        found = self._bins.setdefault(_bin_of(rows), _Bin())
        found.rows.add(rows, now)
        found.seconds.add(seconds, now)

    def refresh(self, now: float) -> None:
        """Draw the curve anew from what is known now; `seconds` answers from it."""
        if not self._bins:
            return
        newest = max(known.seconds.updated_at for known in self._bins.values())
        for key in [
            key
            for key, known in self._bins.items()
            if now - known.seconds.updated_at > FORGET_S and known.seconds.updated_at < newest
        ]:
            del self._bins[key]
        points = sorted(
            (
                _Point(known.rows.value(), known.seconds.value(), known.seconds.count)
                for known in self._bins.values()
            ),
            key=lambda point: point.rows,
        )
        self._points = [_supported(points, index) for index in range(len(points))]
        self._rows = [point.rows for point in self._points]

    def seconds(self, rows: float) -> float:
        """Return the expected time of a forward; 0 while nothing is known."""
        return _along(self._points, self._rows, rows)


def _bin_of(rows: int) -> int:
    if rows <= EXACT_ROWS:
        return rows
    return EXACT_ROWS + round(8 * math.log2(rows / EXACT_ROWS))


def _supported(points: list[_Point], index: int) -> _Point:
    """Let the other sizes have a say on one that was measured only once or twice."""
    point = points[index]
    others = points[:index] + points[index + 1 :]
    if point.count >= FEW or not others:
        return point
    around = _along(others, [other.rows for other in others], point.rows)
    mixed = (point.count * point.seconds + (FEW - point.count) * around) / FEW
    return _Point(point.rows, mixed, point.count)


def _along(points: list[_Point], xs: list[float], rows: float) -> float:
    if not points:
        return 0.0
    index = bisect_left(xs, rows)
    if index < len(points) and xs[index] == rows:
        return points[index].seconds
    if index == 0:
        first = points[0]
        return first.seconds - _slope(points[:SLOPE_BINS], first) * (first.rows - rows)
    if index == len(points):
        last = points[-1]
        return last.seconds + _slope(points[-SLOPE_BINS:], last) * (rows - last.rows)
    left, right = points[index - 1], points[index]
    share = (rows - left.rows) / (right.rows - left.rows)
    return left.seconds + share * (right.seconds - left.seconds)


def _slope(points: list[_Point], end: _Point) -> float:
    """Least-squares seconds per row, kept between a flat line and one through the origin.

    One standard error is taken off: where noise hides the slope, more rows look cheap, are tried,
    and then measured. The other way round they would never be tried.
    """
    total = sum(point.count for point in points)
    mean_rows = sum(point.count * point.rows for point in points) / total
    mean_seconds = sum(point.count * point.seconds for point in points) / total
    spread = sum(point.count * (point.rows - mean_rows) ** 2 for point in points)
    if spread <= 0:
        return 0.0
    slope = (
        sum(
            point.count * (point.rows - mean_rows) * (point.seconds - mean_seconds)
            for point in points
        )
        / spread
    )
    slope -= NOISE * end.seconds / math.sqrt(spread)
    return min(max(slope, 0.0), end.seconds / end.rows)
