"""The line before an orchestrator's targets: who is admitted next, and who is told to come back.

A choice is admitted when it is first in line, fewer are running than may, and a target has free KV
blocks for what it needs at once. Knows requests' priorities and needs; knows no replica and no
token. What happens to an admitted choice when blocks run out is the target's scheduler's affair.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from specserve.errors import Overloaded, SpecServeError
from specserve.orchestrator.routing import Demand

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
"""Bounds of what a refused client is told to wait."""

_GAP_WEIGHT = 0.2


@dataclass(eq=False, slots=True)
class _Waiter:
    demand: Demand
    priority: int
    rank: tuple[int, bool, int]
    """Smaller is sooner: the more urgent, then streams that have begun, then who came first."""
    called: asyncio.Event = field(default_factory=asyncio.Event)
    is_admitted: bool = False
    refusal: SpecServeError | None = None
    """Why it was sent away."""


class AdmissionQueue:
    """Admits choices in order; bounded in length and in time."""

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        timeout_s: float,
        has_room: Callable[[Demand, int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin empty.

        Args:
            timeout_s: longest wait of a choice whose stream has not begun.
            has_room: (need, priority) whether some target can take such a choice now.
        """
        self.num_running = 0
        """Choices admitted that have not ended."""
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._has_room = has_room
        self._clock = clock
        self._line: list[_Waiter] = []
        self._refusal: SpecServeError | None = None
        self._num_came = 0
        self._gap_s = 0.0
        """Mean time between two admissions from the line."""
        self._last_at = clock()

    @property
    def num_waiting(self) -> int:
        """Choices in line."""
        return len(self._line)

    @asynccontextmanager
    async def admitted(
        self, demand: Demand, priority: int, *, is_resumed: bool
    ) -> AsyncIterator[None]:
        """Wait for a turn, and hold it.

        Args:
            priority: higher goes first.
            is_resumed: a stream that was carried over: it goes before new ones of its priority, and
                is refused neither for the line's length nor for its own wait.

        Raises:
            Overloaded: the line is full of choices at least as urgent, or the wait was too long.
            SpecServeError: what `refuse_all` was given.
        """
        if self._refusal is not None:
            raise self._refusal
        waiter = _Waiter(demand, priority, (-priority, not is_resumed, self._num_came))
        self._num_came += 1
        self._line.append(waiter)
        self._line.sort(key=lambda item: item.rank)
        try:
            self.look()
            self._refuse_last(waiter, is_resumed)
            async with asyncio.timeout(None if is_resumed else self._timeout_s):
                await waiter.called.wait()
        except TimeoutError:
            if not waiter.is_admitted:
                raise self._overloaded(
                    f"not admitted within {self._timeout_s:g} s: {self.num_waiting} requests wait"
                ) from None
        except asyncio.CancelledError:
            if waiter.is_admitted:  # in this very turn of the loop
                self._leave()
            raise
        finally:
            if waiter in self._line:
                self._line.remove(waiter)
                self.look()
        if waiter.refusal is not None:
            raise waiter.refusal
        try:
            yield
        finally:
            self._leave()

    def look(self) -> None:
        """Admit from the head of the line as long as there is room. Call it when that may change.

        Nobody overtakes the head: a long prompt would else wait for ever behind short ones.
        """
        while self._line and self.num_running < self._max_running:
            first = self._line[0]
            if not self._has_room(first.demand, first.priority):
                return
            del self._line[0]
            first.is_admitted = True
            self.num_running += 1
            now = self._clock()
            self._gap_s += _GAP_WEIGHT * (now - self._last_at - self._gap_s)
            self._last_at = now
            first.called.set()

    def refuse_all(self, refusal: SpecServeError) -> None:
        """Send everybody away who waits or comes from now on: they may ask elsewhere at once."""
        self._refusal = refusal
        line, self._line = self._line, []
        for waiter in line:
            waiter.refusal = refusal
            waiter.called.set()

    def _leave(self) -> None:
        self.num_running -= 1
        self.look()

    def _refuse_last(self, newcomer: _Waiter, is_resumed: bool) -> None:
        """Send the least urgent away where the line has grown too long."""
        if len(self._line) <= self._max_waiting or (is_resumed and newcomer is self._line[-1]):
            return
        last = self._line.pop()
        last.refusal = self._overloaded(
            f"{self._max_waiting} requests wait already, the most that may"
        )
        last.called.set()

    def _overloaded(self, what: str) -> Overloaded:
        wait_s = self._gap_s * (len(self._line) + 1)
        return Overloaded(what, min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))
