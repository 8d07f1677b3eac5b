"""A TCP port of this machine chosen for another process, and kept for it until it listens.

A port that was only seen to be free may be another's a moment later: two programs that choose at
once take the same one, and the system may give it to an outgoing connection.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"

_RANGE = range(20_000, 32_768)
"""Below what systems give to outgoing connections, which on other systems than Linux take any."""

_chance = random.SystemRandom()
"""Programs that seeded the common generator alike would all choose alike."""


class HeldPort:
    """A port that nobody but a server that was told of it takes. A context manager.

    On Linux the hold is a bound socket that does not listen: other choosers find the port taken,
    while a server that sets SO_REUSEADDR, as all do, may listen on it, and its successor after it.
    Elsewhere two bound sockets exclude each other, so the port is only seen to be free.

    Raises:
        OSError: no port of the range is free.
    """

    def __init__(self) -> None:
        self._socket, self.number = _bind()
        # After the bind: two holds exclude each other because neither had it then.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform != "linux":
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the port back to everybody. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _bind() -> tuple[socket.socket, int]:
    for port in _chance.sample(_RANGE, len(_RANGE)):
        chosen = socket.socket()
        try:
            chosen.bind((HOST, port))
        except OSError:
            chosen.close()
            continue
        return chosen, port
    raise OSError(f"no port from {_RANGE.start} to {_RANGE.stop - 1} is free")
