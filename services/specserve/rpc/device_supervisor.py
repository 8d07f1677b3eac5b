"""Keeps a replica's device running: starts it, restarts one that died, gives up in the end.

Knows devices and a clock; knows no session and no stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from specserve.errors import PeerUnavailable, SpecServeError
from specserve.model.device import Device
from specserve.model.messages import EngineOutput

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""More device deaths than this within RESTART_WINDOW_S, and the replica reports itself failed."""

RESTART_WINDOW_S = 60.0


class DeviceSupervisor:
    """One device at a time, and why there is none."""

    def __init__(
        self,
        replica_id: str,
        start_device: Callable[[], Awaitable[Device]],
        *,
        on_output: Callable[[EngineOutput], None],
        on_death: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: str | None = None
        """Why there is no device to serve; None while there is one."""
        self._replica_id = replica_id
        self._start_device = start_device
        self._on_output = on_output
        self._on_death = on_death
        self._clock = clock
        self._device: Device | None = None
        self._deaths: list[float] = []

    @property
    def device(self) -> Device:
        """The running device, or the last one that ran."""
        if self._device is None:
            raise PeerUnavailable(self._replica_id, "the device has not started")
        return self._device

    async def start(self) -> None:
        """Start the device; raises what its start-up raised."""
        self._device = await self._start_device()
        self._device.on_output = self._on_output

    async def watch(self) -> None:
        """Restart a device that died; returns when it has died too often or does not start."""
        while True:
            why = await self.device.failed
            now = self._clock()
            self._deaths = [t for t in self._deaths if now - t < RESTART_WINDOW_S] + [now]
            logger.error("device of %s died: %s", self._replica_id, why)
            self._on_death()
            if len(self._deaths) > MAX_RESTARTS:
                self.failure = f"the device died {len(self._deaths)} times, last: {why}"
                return
            self.failure = f"the device is being restarted after: {why}"
            try:
                await self.start()
            except SpecServeError as error:
                self.failure = f"the device does not start again: {error}"
                return
            self.failure = None

    async def close(self) -> None:
        """End the device, if one ever started."""
        if self._device is not None:
            await self._device.close()
