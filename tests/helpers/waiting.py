"""Waiting in tests: on a condition, within a bound, never for a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(
    condition: Callable[[], object], what: str = "", within_s: float = 10.0
) -> None:
    """Poll until the condition holds; fail, saying what was waited for, when it does not."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while not condition():
        if loop.time() > end:
            raise AssertionError(f"not within {within_s} s: {what or condition}")
        await asyncio.sleep(0.01)
