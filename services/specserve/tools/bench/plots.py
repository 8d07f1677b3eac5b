"""Three plots as inline SVG: bars, intervals, ranges. One row a line, its name above it.

Rows are horizontal and a plot is as wide as a telephone, so that it reads at any width; colours are
the page's (`page.py`), so that it reads by day and by night; scales are in `axis.py`. Pure: values
in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from specserve.tools.bench import axis
from specserve.tools.bench.axis import Axis

WIDTH = 360
"""Of every plot, in its own units; the page scales it up to half a desktop."""

NUM_COLOURS = 6

_PAD = 6
_VALUE_WIDTH = 116
"""Kept free on the right, where a row's value is written out."""

_NAME_HEIGHT = 16
_MARK_HEIGHT = 12
_GAP = 8
_TITLE_HEIGHT = 20


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a bar plot."""

    name: str
    value: float
    shown: str
    """The value, written out."""
    colour: int = 0
    """Which of the page's colours, from 0."""


@dataclass(frozen=True, slots=True)
class Whisker:
    """One row of an interval plot."""

    name: str
    value: float
    low: float | None
    high: float | None
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Range:
    """One row of a range plot: marks on a line, such as p50, p95 and p99."""

    name: str
    values: tuple[float, ...]
    """Ascending."""
    shown: str
    colour: int = 0


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Plot values as bars from 0."""
    most = max((row.value for row in rows), default=0.0) or 1.0
    scale = (WIDTH - 2 * _PAD - _VALUE_WIDTH) / most
    parts = []
    for top, row in zip(_tops(len(rows)), rows, strict=True):
        width = max(1.0, row.value * scale)
        parts.append(_name(row.name, top))
        parts.append(
            f'<rect class="{_fill(row.colour)}" x="{_PAD}" y="{top + _NAME_HEIGHT}" '
            f'width="{width:.1f}" height="{_MARK_HEIGHT}" rx="2">'
            f"<title>{escape(row.name)}: {escape(row.shown)}</title></rect>"
        )
        parts.append(_value(row.shown, top, _PAD + width + 5))
    return _svg(title, len(rows), parts)


def whiskers(title: str, rows: Sequence[Whisker], lines: Sequence[tuple[float, str]]) -> str:
    """Plot estimates with their intervals, and upright lines to compare them with.

    An interval that goes past an edge ends there, with no cross line.

    Args:
        lines: (value, CSS class) of each upright line.
    """
    points = [*(row.value for row in rows), *(value for value, _ in lines)]
    ends = [end for row in rows for end in (row.low, row.high) if end is not None]
    place = _axis(*axis.around(points, [*ends, *points]))
    parts = place.drawn(_height(len(rows)) - _PAD)
    for top, row in zip(_tops(len(rows)), rows, strict=True):
        middle = top + _NAME_HEIGHT + _MARK_HEIGHT / 2
        shown = f"{row.value:.3f}"
        parts.append(_name(row.name, top))
        # Row by row, so that they cross no name.
        parts += [
            f'<line class="{escape(kind)}" x1="{place(value):.1f}" x2="{place(value):.1f}" '
            f'y1="{middle - 6}" y2="{middle + 10}"><title>{value:g}</title></line>'
            for value, kind in lines
        ]
        if row.low is not None and row.high is not None:
            shown += f" [{_short(row.low)}, {_short(row.high)}]"
            parts.append(
                f'<line class="{_stroke(row.colour)}" x1="{place(row.low):.1f}" '
                f'x2="{place(row.high):.1f}" y1="{middle}" y2="{middle}"/>'
            )
            parts += [
                f'<line class="{_stroke(row.colour)}" x1="{place(end):.1f}" x2="{place(end):.1f}" '
                f'y1="{middle - 4}" y2="{middle + 4}"/>'
                for end in (row.low, row.high)
                if place.low <= end <= place.high
            ]
        parts.append(
            f'<circle class="{_fill(row.colour)}" '
            f'cx="{place(row.value):.1f}" cy="{middle}" r="4.5">'
            f"<title>{escape(row.name)}: {shown}</title></circle>"
        )
        parts.append(_value(shown, top, WIDTH - _PAD - _VALUE_WIDTH + 8))
    return _svg(title, len(rows), parts, axis.HEIGHT)


def ranges(title: str, rows: Sequence[Range]) -> str:
    """Plot a line from the least to the largest value of each row, with a mark at each."""
    place = _axis(0.0, max((row.values[-1] for row in rows), default=1.0))
    parts = place.drawn(_height(len(rows)) - _PAD)
    for top, row in zip(_tops(len(rows)), rows, strict=True):
        middle = top + _NAME_HEIGHT + _MARK_HEIGHT / 2
        parts.append(_name(row.name, top))
        parts.append(
            f'<line class="{_stroke(row.colour)}" x1="{place(row.values[0]):.1f}" '
            f'x2="{place(row.values[-1]):.1f}" y1="{middle}" y2="{middle}"/>'
        )
        parts += [
            f'<circle class="{_fill(row.colour)}" cx="{place(value):.1f}" cy="{middle}" '
            f'r="{3 if index else 4.5}"><title>{escape(row.name)}: {value:.4g}</title></circle>'
            for index, value in enumerate(row.values)
        ]
        parts.append(_value(row.shown, top, WIDTH - _PAD - _VALUE_WIDTH + 8))
    return _svg(title, len(rows), parts, axis.HEIGHT)


def _axis(low: float, high: float) -> Axis:
    """Return the axis between the left edge and the written-out values."""
    return Axis(low, high, _PAD + 5, WIDTH - _PAD - _VALUE_WIDTH - 5)


def _short(value: float) -> str:
    """Write an end of an interval as short as it is worth."""
    return f"{value:.3f}" if value < 10 else f"{value:.3g}"


def _tops(count: int) -> list[int]:
    return [_TITLE_HEIGHT + 4 + i * (_NAME_HEIGHT + _MARK_HEIGHT + _GAP) for i in range(count)]


def _height(count: int) -> int:
    return _TITLE_HEIGHT + 4 + count * (_NAME_HEIGHT + _MARK_HEIGHT + _GAP) + _PAD


def _svg(title: str, count: int, parts: Sequence[str], more_height: int = 0) -> str:
    heading = f'<text class="title" x="{_PAD}" y="14">{escape(title)}</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {_height(count) + more_height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{heading}{"".join(parts)}</svg>'
    )


def _name(text: str, top: int) -> str:
    return f'<text x="{_PAD}" y="{top + 12}">{escape(text)}</text>'


def _value(text: str, top: int, left: float) -> str:
    y = top + _NAME_HEIGHT + _MARK_HEIGHT - 2
    return f'<text class="value" x="{left:.1f}" y="{y}">{escape(text)}</text>'


def _fill(colour: int) -> str:
    return f"f{colour % NUM_COLOURS}"


def _stroke(colour: int) -> str:
    return f"s{colour % NUM_COLOURS}"
