"""Calls in flight, and their replies as they come. Knows no connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Any, Generic, TypeVar

from specserve.errors import DeviceDied, PeerUnavailable

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
        await self.wait(timeout_s)
        if not self._replies and self._error is not None:
            raise self._error
        return self._replies.popleft()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a reply or an error has come, and leave it there.

        Raises:
            TimeoutError: nothing came within `timeout_s` seconds.
        """
        while not self._replies and self._error is None:
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


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


class PendingCalls(Generic[CallT, ReplyT]):
    """The calls in flight on one link, by call id."""

    def __init__(self, pool: str, address: str) -> None:
        self._pool = pool
        self._address = address
        self._calls: dict[int, PendingCall[CallT, ReplyT]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call_id: int) -> bool:
        return call_id in self._calls

    def add(self, pending: PendingCall[CallT, ReplyT]) -> None:
        """Await the replies of a call."""
        self._calls[pending.call_id] = pending

    def drop(self, call_id: int) -> PendingCall[CallT, ReplyT] | None:
        """Stop waiting for a call; None when it was answered, or never known."""
        return self._calls.pop(call_id, None)

    def calls(self) -> list[CallT]:
        """List the calls in flight, oldest first."""
        return [pending.call for pending in self._calls.values()]

    def take(self, reply: Any) -> None:
        """Hand a reply to the call it answers; one that nobody waits for is dropped."""
        pending = self._calls.get(reply.call_id)
        if pending is None:
            return
        last = not getattr(reply, "more_follows", False)
        if last:
            del self._calls[reply.call_id]
        pending.put(reply, last=last)

    def fail_streaming(self, why: str) -> None:
        """Fail decode-ahead: it is not replayed, its caller goes on from what is committed."""
        self._fail([pending for pending in self._calls.values() if pending.streaming], why)

    def fail_all(self, why: str, computed: Collection[str] = ()) -> None:
        """Fail every call with PeerUnavailable.

        Args:
            computed: sessions whose calls fail with DeviceDied: the device was lost in them.
        """
        self._fail(list(self._calls.values()), why, computed)

    def _fail(
        self,
        failed: list[PendingCall[CallT, ReplyT]],
        why: str,
        computed: Collection[str] = (),
    ) -> None:
        for pending in failed:
            self._calls.pop(pending.call_id, None)
            call: Any = pending.call
            session_id = call.session.session_id if computed else ""
            pending.fail(
                DeviceDied(session_id, len(computed))
                if session_id in computed
                else PeerUnavailable(self._pool, f"{self._address}: {why}")
            )
