"""Which sessions a device computes now, in memory that outlives it.

A device that dies says nothing any more, least of all of what. Knows names; knows no forward.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

_LENGTH_BYTES = 4
_SIZE_BYTES = 64 << 10
"""Room for some thousand names; of more, the first are kept."""

_SEPARATOR = "\0"


class BatchRecord:
    """Written by a device around all that it does for a session, read by its server afterwards."""

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        """Use some memory that both know; without any, what only this process knows."""
        self._memory = bytearray(_SIZE_BYTES) if memory is None else memory

    def begin(self, session_ids: Iterable[str]) -> None:
        """Write down who is computed from here on."""
        names = _SEPARATOR.join(session_ids).encode()[: _SIZE_BYTES - _LENGTH_BYTES]
        end = _LENGTH_BYTES + len(names)
        self._memory[_LENGTH_BYTES:end] = names
        # Last: who is read in between is nobody.
        self._memory[:_LENGTH_BYTES] = len(names).to_bytes(_LENGTH_BYTES, "little")

    def end(self) -> None:
        """Write down that nobody is."""
        self._memory[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)

    def read(self) -> frozenset[str]:
        """Return who is computed, or was when the device died."""
        length = int.from_bytes(self._memory[:_LENGTH_BYTES], "little")
        names = bytes(self._memory[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return frozenset(filter(None, names.decode(errors="replace").split(_SEPARATOR)))


def create_shared() -> tuple[int, BatchRecord]:
    """Make a record that another process can open by the file descriptor beside it.

    The descriptor is the caller's to close, once the other has it.
    """
    fd = os.memfd_create("specserve-batch")
    os.ftruncate(fd, _SIZE_BYTES)
    return fd, BatchRecord(mmap.mmap(fd, _SIZE_BYTES))


def open_shared(fd: int) -> BatchRecord:
    """Open a record that `create_shared` made, and close its descriptor."""
    try:
        return BatchRecord(mmap.mmap(fd, _SIZE_BYTES))
    finally:
        os.close(fd)
