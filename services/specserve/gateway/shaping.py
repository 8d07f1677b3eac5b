"""How a stream's events are written: each as it comes, or so that sizes and times say little.

Text is encrypted on its way, but who watches the packets sees how large they are and when they
come. A round commits one token or many, as the draft's guess was right or wrong, and that tells
about the text. Padding makes sizes alike, an interval makes times alike. Knows bytes and a clock;
knows no tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

Sleep = Callable[[float], Awaitable[None]]

MAX_DUE_BYTES = 262_144
"""Bytes that may wait for the next write; then decoding waits too."""

_COMMENT = b":%b\n\n"
"""A line that clients of server-sent events skip."""


async def shaped(
    events: AsyncGenerator[bytes, None],
    interval_s: float,
    pad_bytes: int,
    sleep: Sleep = asyncio.sleep,
) -> AsyncGenerator[bytes, None]:
    """Yield what is to be written, for each event or each interval. Closing it closes the events.

    Args:
        events: what each event says.
        interval_s: time between two writes, in seconds, be there something to say or not; 0
            writes every event as it comes.
        pad_bytes: every write is a multiple of so many bytes; 0 pads nothing.
    """
    if interval_s:
        parts = _paced(events, interval_s, pad_bytes, sleep)
    else:
        parts = (padded(as_event(event), pad_bytes) async for event in events)
    async with aclosing(events), aclosing(parts):
        async for part in parts:
            yield part


def as_event(data: bytes) -> bytes:
    """Return one server-sent event."""
    return b"data: " + data + b"\n\n"


def padded(part: bytes, pad_bytes: int) -> bytes:
    """Fill up to a multiple of `pad_bytes`, with a comment that clients skip."""
    if not pad_bytes or (part and len(part) % pad_bytes == 0):
        return part
    missing = pad_bytes - len(part) % pad_bytes
    shortest = len(_COMMENT % b"")
    while missing < shortest:
        missing += pad_bytes
    return part + _COMMENT % (b" " * (missing - shortest))


async def _paced(
    events: AsyncGenerator[bytes, None], interval_s: float, pad_bytes: int, sleep: Sleep
) -> AsyncGenerator[bytes, None]:
    """Yield what has come, at every interval from the first event on; the end waits for one too."""
    due = bytearray()
    came, written = asyncio.Event(), asyncio.Event()

    async def pump() -> None:
        try:
            # One task reads from first to last: the events' own scopes do not move between tasks.
            async with aclosing(events):
                async for event in events:
                    due.extend(as_event(event))
                    came.set()
                    while len(due) > MAX_DUE_BYTES:
                        written.clear()
                        await written.wait()
        finally:
            came.set()

    loop = asyncio.get_running_loop()
    pumping = asyncio.create_task(pump())
    try:
        await came.wait()
        if pumping.done() and not due:
            pumping.result()  # what goes wrong before the first event is no event
        next_at = loop.time()
        while True:
            is_over = pumping.done()
            part = padded(bytes(due), pad_bytes)
            due.clear()
            written.set()
            if part:
                yield part
            if is_over:
                pumping.result()
                return
            next_at = max(next_at + interval_s, loop.time())
            await sleep(next_at - loop.time())
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
