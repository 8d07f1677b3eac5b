"""A call in flight, and its replies as they come. Knows no connection."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")


class PendingCall(Generic[CallT, ReplyT]):
    """One call in flight. Exactly one coroutine waits for its replies."""

    __slots__ = ("_error", "_replies", "_waiter", "call", "call_id", "closed", "streaming")

    def __init__(self, call: CallT, call_id: int, *, streaming: bool) -> None:
        self.call = call
        self.call_id = call_id
        self.streaming = streaming
        """More than one reply may come: such a call is not sent again after a lost stream."""
        self.closed = False
        """The last reply or an error has come, or nobody waits any more."""
        self._replies: deque[ReplyT] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, reply: ReplyT, *, last: bool) -> None:
        """Hand over a reply."""
        if self.closed:
            return
        self.closed = last
        self._replies.append(reply)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the call with an error; replies that came before are still read first."""
        if self.closed:
            return
        self.closed = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def poll(self) -> ReplyT | None:
        """Take a reply that has come; None while there is none.

        Raises:
            SpecServeError: the call failed.
        """
        if self._replies:
            return self._replies.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def next(self, timeout_s: float | None = None) -> ReplyT:
        """Wait for the next reply.

        Cancelling leaves the call in flight; give it up with `FrameLink.cancel`.

        Raises:
            TimeoutError: nothing came within `timeout_s` seconds.
            SpecServeError: the call failed.
        """
        while not self._replies:
            if self._error is not None:
                raise self._error
            if self.closed:
                raise RuntimeError("every reply of this call was read already")
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            # A timer of our own: asyncio.timeout() costs three times as much, once per round.
            timer = None if timeout_s is None else loop.call_later(timeout_s, _expire, self._waiter)
            try:
                await self._waiter
            finally:
                if timer is not None:
                    timer.cancel()
                self._waiter = None
        return self._replies.popleft()


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
