"""Tells a device that hangs from one that is slow: a slow one's iteration count still moves."""

from __future__ import annotations

import time
from collections.abc import Callable

from specserve.model.messages import EngineLoad


class DeviceProgress:
    """When a replica's device was last seen to move."""

    def __init__(self, hang_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._hang_s = hang_s
        self._clock = clock
        self._moved_at = clock()
        self._num_iterations = -1

    def restart(self) -> None:
        """Count from now: the device got work after a rest, or its stream is new."""
        self._moved_at = self._clock()

    def note(self, load: EngineLoad) -> bool:
        """Take a load report; return whether the device has moved since the last one."""
        if load.num_iterations == self._num_iterations:
            return False
        self._num_iterations = load.num_iterations
        self._moved_at = self._clock()
        return True

    @property
    def stands_still(self) -> bool:
        """Say whether it has not moved for too long; only a device with work should."""
        return self._clock() - self._moved_at > self._hang_s
