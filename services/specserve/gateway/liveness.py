"""Tells an orchestrator that hangs from one that has nothing to say: the latter answers a question.

A process that is stopped, or whose event loop stands still, keeps its connections: nothing but
silence tells of it. Knows a channel and times; knows no choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

HANG_S = 5.0
"""How long an orchestrator may be silent before its streams go to another, in seconds."""


class Liveness:
    """Watches one orchestrator while calls run on it, and on until it answers if it hung."""

    def __init__(
        self, channel: grpc.aio.Channel, hang_s: float, on_hang: Callable[[], None]
    ) -> None:
        """Prepare.

        Args:
            hang_s: half of it may pass in silence, the other half until a question is answered.
            on_hang: called each time that it did not answer.
        """
        self.is_hung = False
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._wait_s = hang_s / 2
        self._on_hang = on_hang
        self._heard_at = 0.0
        self._is_wanted = False
        self._task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin to watch, if that is not done already."""
        self._is_wanted = True
        if self._task is None:
            self.heard()
            self._task = asyncio.create_task(self._watch(), name="liveness")

    def heard(self) -> None:
        """Note that something was said."""
        self._heard_at = asyncio.get_running_loop().time()

    def rest(self) -> None:
        """Watch no longer: no call runs. One that hangs is asked on until it answers."""
        self._is_wanted = False
        if self._task is not None and not self.is_hung:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """End the watch."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._is_wanted or self.is_hung:
            quiet_s = loop.time() - self._heard_at
            if quiet_s < self._wait_s:
                await asyncio.sleep(self._wait_s - quiet_s)
                continue
            self.is_hung = not await self._answers()
            self.heard()  # or asked, which is not to be done without a pause either
            if self.is_hung:
                self._on_hang()
        self._task = None

    async def _answers(self) -> bool:
        """Ask; any answer at all comes from a process that runs."""
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=self._wait_s)
        except grpc.aio.AioRpcError as error:
            return error.code() not in (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.UNAVAILABLE,
            )
        return True
