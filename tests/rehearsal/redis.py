"""The Redis that a head keeps its state in: a server of this machine's, reached over the bridge.

Debian has it in the package `redis-server`; it is looked for on PATH.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

PORT = 6379
PASSWORD = "a-password-of-redis"
START_TIMEOUT_S = 20


def missing() -> str:
    """Say what this machine lacks; empty when it has all."""
    return "" if shutil.which("redis-server") else "no redis-server on PATH"


class Redis:
    """One server, which keeps what it was told across a restart."""

    def __init__(self, host: str, folder: Path) -> None:
        self.address = f"{host}:{PORT}"
        self._host = host
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start, and wait until it listens."""
        self._folder.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [
                *("redis-server", "--bind", self._host, "--port", str(PORT)),
                *("--requirepass", PASSWORD, "--dir", str(self._folder)),
                *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((self._host, PORT), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, "redis-server ended"
                assert time.monotonic() < deadline, "redis-server does not listen"
                time.sleep(0.1)

    def stop(self) -> None:
        """End it. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
