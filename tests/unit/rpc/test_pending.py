"""A call in flight hands over every reply once, in order, and then its error."""

from __future__ import annotations

import asyncio

import pytest

from specserve.errors import PeerUnavailable
from specserve.rpc.pending import PendingCall

LOST = PeerUnavailable("target", "lost")


def _call() -> PendingCall[str, int]:
    return PendingCall("call", 1, streaming=True)


async def test_replies_come_in_order() -> None:
    """Whether the reader was there first or not."""
    call = _call()
    call.put(1, last=False)
    reading = asyncio.ensure_future(asyncio.gather(call.next(), asyncio.sleep(0)))
    await asyncio.sleep(0)
    assert (await reading)[0] == 1
    waiting = asyncio.ensure_future(call.next(5.0))
    await asyncio.sleep(0)
    call.put(2, last=False)
    call.put(3, last=True)
    assert await waiting == 2
    assert await call.next() == 3


async def test_replies_before_an_error_are_read_first() -> None:
    """What has come is not lost with the connection."""
    call = _call()
    call.put(1, last=False)
    call.fail(LOST)
    assert call.poll() == 1
    with pytest.raises(PeerUnavailable):
        call.poll()
    with pytest.raises(PeerUnavailable):
        await call.next()


async def test_nothing_comes_after_the_end() -> None:
    """A duplicate reply or a late error of a closed call is dropped."""
    call = _call()
    call.put(1, last=True)
    call.put(2, last=True)
    call.fail(LOST)
    assert await call.next() == 1
    assert call.poll() is None
    with pytest.raises(RuntimeError, match="read already"):
        await call.next()


async def test_late_reply_can_still_be_taken_B077() -> None:
    """A timeout leaves the call in flight; its reply comes to whoever looks next."""
    call = _call()
    with pytest.raises(TimeoutError):
        await call.next(0.001)
    assert call.poll() is None
    call.put(7, last=True)
    assert call.poll() == 7


async def test_cancelled_reader_leaves_the_reply_to_the_next() -> None:
    """Cancelling a wait loses nothing."""
    call = _call()
    waiting = asyncio.ensure_future(call.next(5.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    call.put(4, last=True)
    assert await call.next() == 4


async def test_error_wakes_the_reader() -> None:
    """A waiting reader learns of the loss at once."""
    call = _call()
    waiting = asyncio.ensure_future(call.next())
    await asyncio.sleep(0)
    call.fail(LOST)
    with pytest.raises(PeerUnavailable):
        await waiting
