"""Work that is too long for the event loop, where other requests' tokens would wait for it.

Knows what is long; knows no work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG_BODY_BYTES = 32_768
"""Of a body that is read: a million bytes of ids take a third of a second."""

LONG_PLAN_IDS = 8192
"""Token ids of a body that are checked and packed."""

LONG_ANSWER_ENTRIES = 2048
"""Figures of an answer that are written, some microseconds each."""

T = TypeVar("T")


async def in_thread_if(long: bool, work: Callable[[], T]) -> T:
    """Do the work in a worker thread where it is long, and here else.

    Cancelling leaves a thread to end by itself, and its result to nobody.
    """
    return await asyncio.to_thread(work) if long else work()
