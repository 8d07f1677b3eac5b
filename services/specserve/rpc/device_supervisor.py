"""Keeps a device running: starts it, restarts one that died or hangs, gives up in the end.

Knows devices and a clock; knows no session and no stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from specserve.errors import PeerUnavailable, SpecServeError
from specserve.model.device import Device
from specserve.model.messages import CallFailed, EngineOutput
from specserve.rpc.device_deaths import DeviceDeath, is_ill
from specserve.rpc.progress import DeviceProgress

logger = logging.getLogger(__name__)

RESTART_WINDOW_S = 60.0
"""A device is judged by the deaths of so long."""

LOOKS = 8
"""How often a device is looked at in the time that it may stand still."""


class DeviceSupervisor:
    """One device at a time, and why there is none."""

    def __init__(
        self,
        replica_id: str,
        start_device: Callable[[], Awaitable[Device]],
        *,
        on_output: Callable[[EngineOutput], None],
        on_death: Callable[[frozenset[str]], None],
        is_working: Callable[[], bool],
        restart_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            on_death: hears which sessions the device was about when it died.
            is_working: says whether the device has calls to answer.
            restart_s: how long it may stand still while it has.
        """
        self.failure: str | None = None
        """Why there is no device to serve; None while there is one."""
        self._replica_id = replica_id
        self._start_device = start_device
        self._on_output = on_output
        self._on_death = on_death
        self._is_working = is_working
        self._restart_s = restart_s
        self._clock = clock
        self._device: Device | None = None
        self._deaths: list[DeviceDeath] = []
        self._has_answered = False
        """The running device has done some work."""

    @property
    def device(self) -> Device:
        """The running device, or the last one that ran."""
        if self._device is None:
            raise PeerUnavailable(self._replica_id, "the device has not started")
        return self._device

    def condemn(self, session_id: str) -> None:
        """Blame a session for the deaths of devices that computed it: others died of it, too."""
        self._deaths = [
            replace(death, computed=frozenset({session_id}))
            if session_id in death.computed
            else death
            for death in self._deaths
        ]

    async def start(self) -> None:
        """Start the device; raises what its start-up raised."""
        self._device = await self._start_device()
        self._has_answered = False
        self._device.on_output = self._take_output

    async def watch(self) -> None:
        """Restart a device that died or hangs; returns when it did so too often, or in vain."""
        while True:
            why = await self._end_of(self.device)
            now = self._clock()
            computed = self.device.computed
            death = DeviceDeath(now, computed, self._has_answered)
            self._deaths = [d for d in self._deaths if now - d.at < RESTART_WINDOW_S] + [death]
            logger.error(
                "device of %s died: %s; it computed %s",
                self._replica_id,
                why,
                ", ".join(sorted(computed)) or "nothing",
            )
            self._on_death(computed)
            if is_ill(self._deaths):
                self.failure = f"the device died {len(self._deaths)} times, last: {why}"
                return
            self.failure = f"the device is being restarted after: {why}"
            await self.device.close()  # one that hangs still has its memory
            try:
                await self.start()
            except SpecServeError as error:
                self.failure = f"the device does not start again: {error}"
                return
            self.failure = None

    def _take_output(self, output: EngineOutput) -> None:
        if not self._has_answered:
            self._has_answered = any(not isinstance(r, CallFailed) for r in output.replies)
        self._on_output(output)

    async def _end_of(self, device: Device) -> SpecServeError:
        """Wait until a device has died, or has stood still with work for too long; say why."""
        progress = DeviceProgress(self._restart_s, self._clock)
        while not device.failed.done():
            await asyncio.wait((device.failed,), timeout=self._restart_s / LOOKS)
            if not self._is_working():
                progress.restart()
            progress.note(device.load)
            if progress.stands_still:
                return PeerUnavailable("device", f"no step for {self._restart_s:.0f} s")
        return device.failed.result()

    async def close(self) -> None:
        """End the device, if one ever started."""
        if self._device is not None:
            await self._device.close()
