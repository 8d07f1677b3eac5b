"""Stop signals for a run that keeps what it has: the first cancels it, later ones change nothing.

Knows signals and an event loop.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cancelled_by_signals(task: asyncio.Future[Any]) -> Iterator[Callable[[], bool]]:
    """Inside, SIGINT and SIGTERM cancel the task, once: an impatient second must not end the
    clean-up that the first began.

    Yields:
        A function that says whether a signal came.
    """
    loop = asyncio.get_running_loop()
    came: list[int] = []

    def stop(number: int) -> None:
        if not came:
            task.cancel()
        came.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield lambda: bool(came)
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
