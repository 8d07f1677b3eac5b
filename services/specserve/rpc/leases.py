"""Which sessions a replica holds, and until when: a forgotten one is found by its lease.

Knows names and a clock; knows neither caller nor device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable


class Leases:
    """The time that each session was last heard of."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_s = lease_s
        """A session not heard of for longer than this has expired."""
        self._clock = clock
        self._heard_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._heard_at)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._heard_at

    def take(self, session_id: str) -> None:
        """Begin a lease, or renew it: a call came."""
        self._heard_at[session_id] = self._clock()

    def renew(self, session_ids: Iterable[str]) -> None:
        """Renew those that are held; a heartbeat begins no lease."""
        now = self._clock()
        for session_id in session_ids:
            if session_id in self._heard_at:
                self._heard_at[session_id] = now

    def end(self, session_id: str) -> None:
        """Forget a session. Idempotent."""
        self._heard_at.pop(session_id, None)

    def clear(self) -> None:
        """Forget every session."""
        self._heard_at.clear()

    def end_expired(self, busy: Collection[str]) -> list[str]:
        """End the leases that have run out and return their sessions.

        Args:
            busy: sessions with a call in flight; a forward may take longer than a lease.
        """
        now = self._clock()
        expired = [
            session_id
            for session_id, heard_at in self._heard_at.items()
            if now - heard_at > self.lease_s and session_id not in busy
        ]
        for session_id in expired:
            del self._heard_at[session_id]
        return expired
