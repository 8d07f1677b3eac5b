"""Stop signals as KeyboardInterrupt, so that `with` blocks unwind, and only while they may.

Knows signals; knows nothing of what is stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """What a stop signal does: it raises KeyboardInterrupt, as often as is allowed."""

    def __init__(self) -> None:
        self._num_left: int | None = None

    def allow(self, count: int) -> None:
        """Let only the next `count` signals interrupt; later ones change nothing.

        Without a limit an impatient second signal would end the clean-up that the first began.
        """
        self._num_left = count

    def install(self) -> None:
        """Take the signals, again if need be: `ray.init` installs a handler of its own."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._num_left is not None:
            if self._num_left == 0:
                return
            self._num_left -= 1
        raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def stop_signals_interrupt() -> Iterator[Interrupts]:
    """Inside, SIGINT and SIGTERM raise KeyboardInterrupt."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    interrupts = Interrupts()
    interrupts.install()
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
