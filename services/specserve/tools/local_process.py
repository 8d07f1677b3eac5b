"""One service as a child process: its command line, its ready line, its end.

Knows processes and signals; knows nothing of how services fit together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from specserve.errors import PeerUnavailable

START_TIMEOUT_S = 120.0
"""Loading a model from a slow disk takes long; a service that cannot start ends by itself."""

STOP_TIMEOUT_S = 15.0
"""A process that has not drained by then is killed."""

_LOG_TAIL_BYTES = 4000


class LocalService:
    """One service's process."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.role = role
        self.address = ""
        """host:port of its gRPC server (of its HTTP server for a gateway); set when ready."""
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Operating system process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.returncode

    async def wait_ready(self) -> None:
        """Wait for the ready line.

        Raises:
            PeerUnavailable: the process ended, or START_TIMEOUT_S passed, without one.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while self._process.stdout and (line := await self._process.stdout.readline()):
                    with contextlib.suppress(ValueError):
                        event = json.loads(line)
                        if event.get("event") == "ready":
                            self.address = str(event["address"])
                            return
                await self._process.wait()
        except TimeoutError:
            raise PeerUnavailable(
                self.role, f"not ready after {START_TIMEOUT_S:.0f} s: {self.log_tail()}"
            ) from None
        raise PeerUnavailable(
            self.role, f"ended with exit code {self._process.returncode}: {self.log_tail()}"
        )

    def log_tail(self) -> str:
        """Return the end of what the process wrote to stderr."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """End the process as a crash would."""
        self.send_signal(signal.SIGKILL)

    async def stop(self) -> int:
        """Ask the process to drain and stop; kill it if it does not. Returns the exit code."""
        if self._process.returncode is None:
            self.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                self.kill()
        code = await self._process.wait()
        self._log.close()
        return code


async def launch(role: str, flags: Sequence[str], env: Mapping[str, str]) -> LocalService:
    """Start one service's process; it is not ready yet."""
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by LocalService.stop
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "specserve.cli",
        role,
        *flags,
        # Its stdin ends with this process, even one that is killed.
        "--stop-on-eof",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        env=own_environment(env),
        # Ctrl-C at the terminal is for the program that started this, which then stops it.
        start_new_session=True,
    )
    return LocalService(role, process, log)


def own_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which a child imports this very package, installed or not."""
    source = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH")
    path = source if not rest else f"{source}{os.pathsep}{rest}"
    return {**os.environ, **(added or {}), "PYTHONPATH": path}
