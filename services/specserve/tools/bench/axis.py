"""The horizontal axis of a plot: where a value lies, and ticks at round numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

HEIGHT = 18
"""Of the ticks and their numbers, below the rows."""

_MOST_TICKS = 5


class Axis:
    """Places values between two edges; one outside of them is placed at the nearer edge."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        """Make an axis.

        Args:
            low, high: values at the edges.
            left, right: the edges, in the plot's own units.
        """
        self.low, self.high = low, high if high > low else low + 1.0
        self.left, self.right = left, right

    def __call__(self, value: float) -> float:
        """Return where a value lies."""
        share = (value - self.low) / (self.high - self.low)
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)

    def ticks(self) -> list[float]:
        """Return round numbers between the edges, five at most."""
        span = self.high - self.low
        size = 10.0 ** math.floor(math.log10(span / _MOST_TICKS))
        steps = (size, 2 * size, 5 * size, 10 * size)
        step = next(step for step in steps if span / step < _MOST_TICKS)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def drawn(self, top: float) -> list[str]:
        """Draw the axis with its ticks, its line at `top`."""
        parts = [
            f'<line class="axis" x1="{self.left:.1f}" x2="{self.right:.1f}" y1="{top}" y2="{top}"/>'
        ]
        for tick in self.ticks():
            x = f"{self(tick):.1f}"
            parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{top}" y2="{top + 3}"/>')
            parts.append(f'<text class="tick" x="{x}" y="{top + 14}">{tick:g}</text>')
        return parts


def around(points: Sequence[float], ends: Sequence[float]) -> tuple[float, float]:
    """Return the values at the edges for estimates and the ends of their intervals.

    An interval far wider than the estimates lie apart would press all of them together: it goes
    past the edge.
    """
    low, high = min(points, default=0.0), max(points, default=1.0)
    reach = max(high - low, abs(high) / 2)
    return max(min(ends, default=low), low - reach), min(max(ends, default=high), high + reach)
