"""Waiting in tests: on a condition, within a bound, never for a time.

For what tells nobody when it happens; where there is an event, await the event.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

What = str | Callable[[], object]
"""What is waited for, for people; asked for at the end where it is a function."""


async def eventually(
    condition: Callable[[], object],
    what: What = "",
    within_s: float = 10.0,
    *,
    every_s: float = 0.01,
) -> None:
    """Look until the condition holds; fail, saying what was waited for, when it does not.

    Args:
        condition: what it returns is awaited where it can be.
        every_s: time between two looks.
    """
    end = time.monotonic() + within_s
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        _check(end, within_s, what or repr(condition))
        await asyncio.sleep(every_s)


def until(
    condition: Callable[[], object],
    what: What = "",
    within_s: float = 10.0,
    *,
    every_s: float = 0.1,
) -> float:
    """Do the same without an event loop; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        _check(began + within_s, within_s, what or repr(condition))
        time.sleep(every_s)
    return time.monotonic() - began


def _check(end: float, within_s: float, what: What) -> None:
    if time.monotonic() > end:
        raise AssertionError(f"not within {within_s} s: {what() if callable(what) else what}")
