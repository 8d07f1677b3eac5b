"""What the command line writes: lines, tables, progress and colours. The only writer of stdout.

Knows no service and no model. Colours follow NO_COLOR and whether anybody is looking.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

RESET = "\x1b[0m"
BOLD = "\x1b[1m"
DIM = "\x1b[2m"
RED = "\x1b[31m"
GREEN = "\x1b[32m"
YELLOW = "\x1b[33m"
CYAN = "\x1b[36m"

_PROGRESS_INTERVAL_S = 0.1
_PLAIN_PROGRESS_INTERVAL_S = 5.0
_BAR_WIDTH = 24


def say(text: str = "") -> None:
    """Write one line to stdout, now."""
    write(text + "\n")


def write(text: str) -> None:
    """Write text to stdout, now: streams must not sit in a buffer."""
    sys.stdout.write(text)
    sys.stdout.flush()


def warn(text: str) -> None:
    """Write one line to stderr, now."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say_event(event: str, fields: Mapping[str, str | int | float | None]) -> None:
    """Write one JSON line to stdout, for programs that started this one."""
    say(json.dumps({"event": event, **fields}))


def wants_colour(stream: TextIO) -> bool:
    """Return whether to colour: a terminal that did not say NO_COLOR (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, colour: str, enabled: bool) -> str:
    """Wrap text in a colour, or leave it."""
    return f"{colour}{text}{RESET}" if enabled and text else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out in columns; numbers are the caller's to format."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines)


def human_bytes(count: float) -> str:
    """Format a size for people: 269.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Progress:
    """A progress line on stderr: a bar on a terminal, a line every few seconds elsewhere.

    Call it with what is being done and which share of it; called often, it writes seldom.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._label = ""
        self._written_at = 0.0
        self._open_line = False
        self._finished = False

    def __call__(self, label: str, share: float) -> None:
        """Show that `label` is done to `share`, in [0, 1]."""
        interval = _PROGRESS_INTERVAL_S if self._is_terminal else _PLAIN_PROGRESS_INTERVAL_S
        now = time.monotonic()
        finished = share >= 1
        if label == self._label:
            if self._finished or (not finished and now - self._written_at < interval):
                return
        else:
            self.close()
        self._label, self._written_at, self._finished = label, now, finished
        percent = f"{100 * min(1.0, share):3.0f} %"
        if self._is_terminal:
            bar = ("=" * round(min(1.0, share) * _BAR_WIDTH)).ljust(_BAR_WIDTH)
            self._stream.write(f"\r\x1b[K{label} [{bar}] {percent}")
            self._open_line = True
        else:
            self._stream.write(f"{label}: {percent}\n")
        self._stream.flush()
        if finished:
            self.close()

    def close(self) -> None:
        """End the line. Idempotent."""
        if self._open_line:
            self._stream.write("\n")
            self._stream.flush()
            self._open_line = False
