"""What a link writes next: everything that was said in one event-loop turn, in one frame.

Knows calls by identity and the frame's bounds; knows no connection and no reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

from specserve.rpc.framing import num_in_frame
from specserve.rpc.v1 import common_pb2

CallT = TypeVar("CallT")


class LinkOutbox(Generic[CallT]):
    """Calls, cancels, releases and a heartbeat that are due."""

    def __init__(self) -> None:
        self._calls: list[CallT] = []
        self._cancels: list[common_pb2.Cancel] = []
        self._releases: list[common_pb2.Release] = []
        self._heartbeat_due = False
        self._wake = asyncio.Event()

    @property
    def is_due(self) -> bool:
        """Say whether there is something to write."""
        return self._wake.is_set()

    def put(self, call: CallT) -> None:
        """Put a call into the next frame."""
        self._calls.append(call)
        self._wake.set()

    def withdraw(self, call: CallT) -> bool:
        """Take a call back; False when it has left already."""
        unsent = [other for other in self._calls if other is not call]
        was_unsent = len(unsent) < len(self._calls)
        self._calls = unsent
        return was_unsent

    def cancel(self, call_id: int) -> None:
        """Say that a call's answer is not wanted, or wanted at once."""
        self._cancels.append(common_pb2.Cancel(call_id=call_id))
        self._wake.set()

    def release(self, session_id: str, *, is_poison: bool = False) -> None:
        """Say that a session is given up, and maybe that devices die of it."""
        self._releases.append(common_pb2.Release(session_id=session_id, is_poison=is_poison))
        self._wake.set()

    def beat(self) -> None:
        """Renew the leases with the next frame."""
        self._heartbeat_due = True
        self._wake.set()

    def flush(self) -> None:
        """Write a frame soon, be it empty."""
        self._wake.set()

    def restart(self, calls: Iterable[CallT]) -> None:
        """Begin a new stream with these calls; releases that were not written stay due."""
        self._calls = list(calls)
        self._cancels = []
        self._wake.set()

    def forget_releases(self) -> None:
        """Drop releases: nobody holds the sessions any more."""
        self._releases.clear()

    async def next_frame(self, make_frame: Callable[..., Any], sessions: Collection[str]) -> Any:
        """Wait until something is due and give it as a frame.

        Args:
            make_frame: the service's frame.
            sessions: what a heartbeat renews, read when the frame is made.
        """
        await self._wake.wait()
        self._wake.clear()
        heartbeat = None
        if self._heartbeat_due:
            self._heartbeat_due = False
            heartbeat = common_pb2.Heartbeat(session_ids=sessions)
        # A burst of long prompts must not add up to a frame that the peer refuses.
        count = num_in_frame(self._calls)
        calls, self._calls = self._calls[:count], self._calls[count:]
        if self._calls:
            self._wake.set()
        frame = make_frame(
            calls=calls, cancels=self._cancels, releases=self._releases, heartbeat=heartbeat
        )
        self._cancels, self._releases = [], []
        return frame
