"""What a server sees of a device, and what both kinds of device share.

Knows the event loop; knows no protobuf, no scheduling and no model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import SpecServeError
from specserve.model.batch_record import BatchRecord
from specserve.model.messages import Arrived, EngineLoad, EngineOutput, Message, ModelInfo, Role

logger = logging.getLogger(__name__)


class Device(Protocol):
    """An engine somewhere else."""

    info: ModelInfo
    """What was loaded; valid after start."""
    load: EngineLoad
    """The last load heard of."""
    on_output: Callable[[EngineOutput], None]
    """Called on the event loop with each output; set before start."""
    failed: asyncio.Future[SpecServeError]
    """Done when the device died; never done by close."""

    @property
    def computed(self) -> frozenset[str]:
        """Sessions that it computes now, or did when it died; empty between forwards."""
        ...

    async def start(self) -> None:
        """Load and wait until it is ready.

        Raises:
            SpecServeError: what kept the engine from loading.
        """
        ...

    def send(self, message: Message) -> None:
        """Queue a message; all of one event-loop turn leave in one write."""
        ...

    def flush(self) -> None:
        """Write what is queued now: all that one turn brings is known to be there."""
        ...

    async def close(self) -> None:
        """Stop the device and wait for its end; a second time is harmless."""
        ...


class BaseDevice(ABC):
    """What both devices share: the outgoing batch, the last load, the failure."""

    def __init__(
        self, config: EngineConfig, role: Role, speculative: SpeculativeConfig | None
    ) -> None:
        self._config = config
        self._role: Role = role
        self._speculative = speculative
        self._outgoing: list[Message] = []
        self._record = BatchRecord()
        self._ready: asyncio.Future[ModelInfo]
        self._is_closed = False
        self.info: ModelInfo
        self.load = EngineLoad(0, 0, 0, 0, 0)
        self.on_output: Callable[[EngineOutput], None] = lambda _: None
        self.failed: asyncio.Future[SpecServeError]

    @property
    def computed(self) -> frozenset[str]:
        """Sessions that it computes now, or did when it died; empty between forwards."""
        return self._record.read()

    def send(self, message: Message) -> None:
        """Queue a message; all of one event-loop turn leave in one write."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outgoing.append(message)

    def flush(self) -> None:
        """Write what is queued now."""
        batch, self._outgoing = tuple(self._outgoing), []
        if batch and not self._is_closed:
            self._write((Arrived(time.monotonic()), *batch))

    @abstractmethod
    def _write(self, batch: Sequence[Message]) -> None:
        """Hand a batch to the device, without blocking."""

    def _received(self, message: object) -> None:
        """Handle what the device says: it is ready, it failed, or it has output."""
        if isinstance(message, EngineOutput):
            self.load = message.load
            self.on_output(message)
        elif isinstance(message, ModelInfo):
            # Before its first output a device has its whole pool free.
            self.load = EngineLoad(message.num_blocks, message.num_blocks, 0, 0, 0)
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, SpecServeError):
            self._died(message)

    def _died(self, error: SpecServeError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        elif not self._is_closed and not self.failed.done():
            logger.error("the device died: %s", error)
            self.failed.set_result(error)
