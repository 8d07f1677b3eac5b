"""Devices: an engine in a process of its own or in a thread, behind one interface.

Knows no protobuf, no scheduling and, until a thread asks for it, no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Sequence

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import PeerUnavailable, SpecServeError
from specserve.model.device_base import BaseDevice, Device
from specserve.model.device_pipe import ProcessDevice
from specserve.model.messages import Message, Role, Shutdown

__all__ = ["Device", "ProcessDevice", "ThreadDevice", "create_device"]

logger = logging.getLogger(__name__)


class ThreadDevice(BaseDevice):
    """An engine in a thread of the server: for tests and debuggers."""

    async def start(self) -> None:
        """Start the thread and wait until its model is loaded."""
        self._loop = asyncio.get_running_loop()
        self._ready, self.failed = self._loop.create_future(), self._loop.create_future()
        self._queue: queue.SimpleQueue[Sequence[Message]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="specserve-device", daemon=True)
        self._thread.start()
        self.info = await self._ready

    async def close(self) -> None:
        """Ask for the end and wait for it."""
        if self._is_closed:
            return
        self._outgoing.append(Shutdown())
        self.flush()
        self._is_closed = True
        await self._loop.run_in_executor(None, self._thread.join)

    def _write(self, batch: Sequence[Message]) -> None:
        self._queue.put(batch)

    def _receive(self, timeout_s: float | None) -> list[Message]:
        messages: list[Message] = []
        with contextlib.suppress(queue.Empty):
            messages.extend(self._queue.get(timeout_s != 0.0, timeout_s or None))
            while True:
                messages.extend(self._queue.get_nowait())
        return messages

    def _run(self) -> None:
        """Load, report, serve: the thread."""
        # Imported late: a server whose device is a process never loads torch.
        from specserve.model.device_loop import build_engine, run_device  # noqa: PLC0415

        try:
            engine = build_engine(self._config, self._role, self._speculative, self._record)
            self._say(engine.info)
            run_device(engine, self._receive, self._say, self._record)
        except SpecServeError as error:
            self._say(error)
        except BaseException as error:
            # A library's panic is no Exception, and a thread that ends without a word would be
            # taken for one that hangs.
            logger.exception("the device loop failed")
            self._say(PeerUnavailable("device", f"{type(error).__name__}: {error}"))

    def _say(self, message: object) -> None:
        # A loop that closed before the device was told has nobody left to hear it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._received, message)


def create_device(
    config: EngineConfig, role: Role, speculative: SpeculativeConfig | None
) -> Device:
    """Make the device that the configuration asks for; `start` loads it."""
    if config.device_mode == "thread":
        return ThreadDevice(config, role, speculative)
    return ProcessDevice(config, role, speculative)
