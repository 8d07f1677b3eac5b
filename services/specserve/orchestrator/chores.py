"""What need not be done before a request's next call has left: its rounds written down, and so on.

Between the target's answer and the next call nothing runs but this one request, and both devices
wait for it. Knows the event loop; knows no chore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Chores:
    """One request's, in order."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def add(self, chore: Callable[[], None]) -> None:
        """Leave something for later."""
        self._waiting.append(chore)

    def call_sent(self) -> None:
        """Do what waits, behind the call that was just put into its link's outbox."""
        if self._waiting:
            # The outbox has woken its writer; what is called soon from now on comes after it.
            asyncio.get_running_loop().call_soon(self.run)

    def run(self) -> None:
        """Do what waits now. Idempotent."""
        waiting, self._waiting = self._waiting, []
        for chore in waiting:
            chore()
