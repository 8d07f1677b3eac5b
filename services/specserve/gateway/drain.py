"""How a gateway stops: no new requests, time for those that run, then an end that says why.

Knows how many requests are being answered; knows no server and no signal: whoever runs the gateway
calls `drain`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from specserve.errors import Draining

LAST_WORD_S = 1.0
"""How long a request that was given up may take to tell its client so, in seconds."""


class Drain:
    """Whether requests are taken, and how many are being answered."""

    def __init__(self, name: str = "gateway") -> None:
        self._name = name
        self._num_running = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._given_up = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """True once no new requests are taken."""
        return self._is_draining

    def error(self) -> Draining:
        """Return what a request is told that is refused or given up."""
        return Draining(self._name)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request while it is answered.

        Raises:
            Draining: no new requests are taken.
        """
        if self._is_draining:
            raise self.error()
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()

    async def until_given_up(self) -> None:
        """Wait until the grace is over: what still runs has to end now."""
        await self._given_up.wait()

    async def drain(self, grace_s: float) -> None:
        """Take no new requests; let running ones finish for `grace_s` seconds, then give them up.

        Called again with less grace it hurries. Cancelling it leaves requests running and new ones
        refused.
        """
        self._is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        self._given_up.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._idle.wait()
