"""A modelled device under a clock that jumps: calls wait, share forwards, and are answered.

As in the real scheduler, calls that are ready when a forward starts share it, and a forward is held
for calls that are about to come when that pays.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specserve.model.hold_rule import LATE, Due, Room, best_hold_s

Curve = Callable[[float], float]
"""Rows of a forward -> its seconds."""

NUM_GAPS = 8


def memory_bound(step_s: float = 0.02) -> Curve:
    """A large device: a hundred rows cost hardly more than one."""
    return lambda rows: step_s * (1 + 0.0005 * rows)


def compute_bound(step_s: float = 0.02) -> Curve:
    """A small device: a row more costs a tenth more."""
    return lambda rows: step_s * (0.9 + 0.1 * rows)


def roofline(step_s: float = 0.02, knee: int = 48) -> Curve:
    """Flat up to the knee, proportional to the rows beyond it."""
    return lambda rows: step_s * max(1.0, rows / knee)


class Clock:
    """Events in order of their time."""

    def __init__(self, seed: int) -> None:
        self.now = 100.0  # no clock begins at 0
        self.random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), event))

    def run_until(self, end: float) -> None:
        while self._events and self._events[0][0] < end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end


@dataclass(slots=True, eq=False)
class Call:
    """A call on a device: forwards still to take, and rows in each."""

    session: object
    arrived: float
    num_forwards: int
    rows: int
    first_rows: int
    answered: Callable[[Call], None]
    forwarded: Callable[[int, float], None]
    """Told (rows, seconds) of each forward."""
    started: float | None = None
    forward_s: float = 0.0
    last_rows: int = 0

    @property
    def queue_s(self) -> float:
        return 0.0 if self.started is None else self.started - self.arrived


@dataclass(slots=True)
class _Rhythm:
    """When a session's next call is due, as `KvSession` works it out."""

    replied_at: float | None = None
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_GAPS))
    rows: int = 1
    """Of its last call."""

    def arrived(self, now: float) -> None:
        if self.replied_at is not None:
            self.gaps_s.append(now - self.replied_at)
            self.replied_at = None

    def due_in_s(self, now: float) -> list[float]:
        if self.replied_at is None:
            return []
        silent_s = now - self.replied_at
        late = [gap * (1 + LATE) for gap in self.gaps_s]
        return [gap - silent_s for gap in late if gap > silent_s]


class Device:
    """One queue, one forward at a time."""

    def __init__(self, clock: Clock, curve: Curve, *, noise: float, pause_chance: float) -> None:
        """Model a device.

        Args:
            noise: standard deviation of a forward's time, as a share.
            pause_chance: of a forward that takes twenty times as long.
        """
        self.curve = curve
        self._clock = clock
        self._noise = noise
        self._pause_chance = pause_chance
        self._ready: list[Call] = []
        self._is_busy = False
        self._rhythms: dict[object, _Rhythm] = {}
        self._held_until: float | None = None

    def submit(self, call: Call) -> None:
        rhythm = self._rhythms.setdefault(call.session, _Rhythm())
        rhythm.arrived(self._clock.now)
        rhythm.rows = call.first_rows or call.rows
        self._ready.append(call)
        if not self._is_busy:
            self._try_start()

    def _try_start(self) -> None:
        if self._is_busy or not self._ready:
            return
        if (wait := self._hold_s()) > 0:
            self._clock.at(wait, self._try_start)
            return
        self._held_until = None
        self._is_busy = True
        calls, now = list(self._ready), self._clock.now
        for call in calls:
            call.started = now if call.started is None else call.started
        rows = sum(call.first_rows or call.rows for call in calls)
        seconds = self._seconds(rows)
        self._clock.at(seconds, lambda: self._done(calls, rows, seconds))

    def _seconds(self, rows: int) -> float:
        chance = self._clock.random
        if chance.random() < self._pause_chance:
            return 20 * self.curve(rows)
        return self.curve(rows) * max(0.5, chance.gauss(1.0, self._noise))

    def _hold_s(self) -> float:
        now = self._clock.now
        if any(call.started is not None for call in self._ready):
            return 0.0
        if self._held_until is not None and now >= self._held_until - 1e-12:
            return 0.0
        due = [
            Due(waits, rhythm.gaps_s[-1], rhythm.rows)
            for rhythm in self._rhythms.values()
            if (waits := rhythm.due_in_s(now))
        ]
        rows = sum(call.first_rows or call.rows for call in self._ready)
        room = Room(num_calls=10**9, num_tokens=10**9)
        best = best_hold_s(len(self._ready), rows, due, room, self.curve)
        if best == 0.0:
            return 0.0
        until = now + best
        self._held_until = until if self._held_until is None else min(until, self._held_until)
        return max(0.0, self._held_until - now)

    def _done(self, calls: list[Call], rows: int, seconds: float) -> None:
        self._is_busy = False
        for call in calls:
            call.forward_s += seconds
            call.last_rows = rows
            call.first_rows = 0
            call.num_forwards -= 1
            call.forwarded(rows, seconds)
            if call.num_forwards == 0:
                self._ready.remove(call)
                self._rhythms[call.session].replied_at = self._clock.now
                call.answered(call)
        # Whatever arrives in this very instant still joins.
        self._clock.at(0.0, self._try_start)
