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

STUCK_S = 1.0
"""A device reports that it moves far more often than this, unless one forward takes so long."""

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
        self._condemned: dict[str, float] = {}
        """Sessions that devices die of, and since when it is known."""
        self._has_answered = False
        """The running device has done some work."""
        self._moved_at = clock()
        self._given_up: asyncio.Future[SpecServeError]
        """Done when the running device is to be ended before it is known to hang for good."""

    @property
    def device(self) -> Device:
        """The running device, or the last one that ran."""
        if self._device is None:
            raise PeerUnavailable(self._replica_id, "the device has not started")
        return self._device

    def condemn(self, session_id: str) -> None:
        """Blame a session for the deaths of devices that computed it: others died of it, too.

        One that hangs in it is ended at once.
        """
        now = self._clock()
        known = self._condemned.items()
        self._condemned = {name: at for name, at in known if now - at < RESTART_WINDOW_S}
        self._condemned[session_id] = now
        self._deaths = [self._put_down(death) for death in self._deaths]
        if session_id in self.stuck and not self._given_up.done():
            hangs = PeerUnavailable("device", f"hangs in session {session_id}, as others did")
            self._given_up.set_result(hangs)

    def _put_down(self, death: DeviceDeath) -> DeviceDeath:
        """Put a death down to the session that is known for it."""
        guilty = death.computed & self._condemned.keys()
        return replace(death, computed=frozenset({min(guilty)})) if guilty else death

    @property
    def stuck(self) -> frozenset[str]:
        """Sessions in a forward that takes long; empty while the device moves."""
        if self._clock() - self._moved_at < STUCK_S:
            return frozenset()
        return self.device.computed

    async def start(self) -> None:
        """Start the device; raises what its start-up raised."""
        self._device = await self._start_device()
        self._has_answered, self._moved_at = False, self._clock()
        self._given_up = asyncio.get_running_loop().create_future()
        self._device.on_output = self._take_output

    async def watch(self) -> None:
        """Restart a device that died or hangs; returns when it did so too often, or in vain."""
        while True:
            why = await self._end_of(self.device)
            now = self._clock()
            computed = self.device.computed
            death = DeviceDeath(now, computed, self._has_answered)
            self._deaths = [d for d in self._deaths if now - d.at < RESTART_WINDOW_S]
            self._deaths.append(self._put_down(death))
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
        self._moved_at = self._clock()
        if not self._has_answered:
            self._has_answered = any(not isinstance(r, CallFailed) for r in output.replies)
        self._on_output(output)

    async def _end_of(self, device: Device) -> SpecServeError:
        """Wait until a device has died, or has stood still with work for too long; say why."""
        progress = DeviceProgress(self._restart_s, self._clock)
        while not device.failed.done():
            await asyncio.wait(
                (device.failed, self._given_up),
                timeout=self._restart_s / LOOKS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._given_up.done():
                return self._given_up.result()
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
