"""Three plots as inline SVG: bars, intervals, ranges. One row a line, its name above it.

Rows are horizontal and a plot is as wide as a telephone, so that it reads at any width; colours are
the page's (`page.py`), so that it reads by day and by night. Pure: values in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
"""Of every plot, in its own units; the page scales it up to half a desktop."""

NUM_COLOURS = 6

_PAD = 6
_VALUE_WIDTH = 104
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

    Args:
        lines: (value, CSS class) of each upright line.
    """
    ends = [end for row in rows for end in (row.low, row.value, row.high) if end is not None]
    place = _scale([*ends, *(value for value, _ in lines)])
    bottom = _height(len(rows)) - _PAD
    parts = [
        f'<line class="{escape(kind)}" x1="{place(value):.1f}" x2="{place(value):.1f}" '
        f'y1="{_TITLE_HEIGHT + 2}" y2="{bottom}"><title>{value:g}</title></line>'
        for value, kind in lines
    ]
    for top, row in zip(_tops(len(rows)), rows, strict=True):
        middle = top + _NAME_HEIGHT + _MARK_HEIGHT / 2
        shown = f"{row.value:.3f}"
        parts.append(_name(row.name, top))
        if row.low is not None and row.high is not None:
            shown += f" [{row.low:.3f}, {row.high:.3f}]"
            parts.append(
                f'<line class="{_stroke(row.colour)}" x1="{place(row.low):.1f}" '
                f'x2="{place(row.high):.1f}" y1="{middle}" y2="{middle}"/>'
            )
        parts.append(
            f'<circle class="{_fill(row.colour)}" '
            f'cx="{place(row.value):.1f}" cy="{middle}" r="4.5">'
            f"<title>{escape(row.name)}: {shown}</title></circle>"
        )
        parts.append(_value(f"{row.value:.3f}", top, WIDTH - _PAD - _VALUE_WIDTH + 14))
    return _svg(title, len(rows), parts)


def ranges(title: str, rows: Sequence[Range]) -> str:
    """Plot a line from the least to the largest value of each row, with a mark at each."""
    place = _scale([0.0, *(value for row in rows for value in row.values)])
    parts = []
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
        parts.append(_value(row.shown, top, WIDTH - _PAD - _VALUE_WIDTH + 14))
    return _svg(title, len(rows), parts)


class _scale:  # noqa: N801 - used as the function that it makes
    """Places values between the left edge and the written-out ones."""

    def __init__(self, values: Sequence[float]) -> None:
        self._low, high = min(values, default=0.0), max(values, default=1.0)
        room = WIDTH - 2 * _PAD - _VALUE_WIDTH
        self._factor = (room - 10) / (high - self._low or 1.0)

    def __call__(self, value: float) -> float:
        return _PAD + 5 + (value - self._low) * self._factor


def _tops(count: int) -> list[int]:
    return [_TITLE_HEIGHT + 4 + i * (_NAME_HEIGHT + _MARK_HEIGHT + _GAP) for i in range(count)]


def _height(count: int) -> int:
    return _TITLE_HEIGHT + 4 + count * (_NAME_HEIGHT + _MARK_HEIGHT + _GAP) + _PAD


def _svg(title: str, count: int, parts: Sequence[str]) -> str:
    heading = f'<text class="title" x="{_PAD}" y="14">{escape(title)}</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {_height(count)}" role="img" '
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
