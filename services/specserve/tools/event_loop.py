"""The event loop of a plain process: uvloop where there is one, as in Ray's own actors.

Knows loops; knows no service.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import TypeVar

ResultT = TypeVar("ResultT")


def run(main: Coroutine[None, None, ResultT]) -> ResultT:
    """Run a service's main coroutine on a loop of its own."""
    try:
        import uvloop
    except ImportError:  # Windows, and machines that are only lent
        return asyncio.run(main)
    return uvloop.run(main)


def settle() -> None:
    """Take what a start has made out of the collector's sight: no later collection looks at it."""
    gc.collect()
    gc.freeze()
