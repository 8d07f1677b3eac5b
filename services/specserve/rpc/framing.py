"""How much of what waits goes into one frame. Knows sizes; knows neither calls nor replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specserve.rpc.channel import MAX_FRAME_BYTES, MAX_FRAME_ITEMS


def num_in_frame(waiting: Sequence[Any]) -> int:
    """Return how many of the first messages, calls or replies, go into one frame.

    A lone one always does, whatever its size: it cannot be made smaller.
    """
    if len(waiting) < 2:
        return len(waiting)
    num_bytes = 0
    for number, message in enumerate(waiting[:MAX_FRAME_ITEMS]):
        num_bytes += message.ByteSize()
        if number and num_bytes > MAX_FRAME_BYTES:
            return number
    return min(len(waiting), MAX_FRAME_ITEMS)
