"""A value read from files, and read anew when they change.

For secrets that are replaced under a running process: keys and certificates of a mounted Secret,
whose files are links into a folder that is swapped as a whole. Knows files; what they say is the
caller's affair.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from specserve.errors import ConfigurationError

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0
"""Longest time between a change and the first use of it, in seconds."""

_ATTEMPTS = 5
"""Reads of files that change while they are read, before the last is taken as it is."""

T = TypeVar("T")

_Signature = tuple[tuple[int, int, int, int], ...]
"""(device, inode, size, time of change) of each file; empty where one is missing."""


class Reloading(Generic[T]):
    """The value as last read well. Threads may share it."""

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        load: Callable[[], T],
        *,
        period_s: float = LOOK_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read for the first time.

        Args:
            what: what the files hold, for the log.
            load: reads the files, all of them.
            period_s: looks at the files at most this often, in seconds.

        Raises:
            ConfigurationError: they cannot be read, or `load` refuses what they hold.
        """
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        self.generation = 0
        """How often another value was taken since the first."""
        self.failure: str | None = None
        """Why the files as they are now are not in use; None while they are."""
        self._value, self._signature = self._read()
        self._looked_at = clock()

    def current(self) -> T:
        """Return the value; look at the files first, unless that was done a moment ago.

        Files that cannot be used keep the value as it was; the log says so once per change.
        """
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= self._period_s:
                self._looked_at = now
                if self._stat() != self._signature:
                    self._renew()
            return self._value

    def _renew(self) -> None:
        try:
            self._value, self._signature = self._read()
        except ConfigurationError as error:
            self._signature = self._stat()
            self.failure = str(error)
            logger.error("%s: the old one stays in use: %s", self._what, error)
            return
        self.failure = None
        self.generation += 1
        logger.warning("%s: read anew", self._what)

    def _read(self) -> tuple[T, _Signature]:
        """Read files that belong together: all from before a change, or all from after it."""
        for _ in range(_ATTEMPTS - 1):
            before = self._stat()
            try:
                value = self._load()
            except ConfigurationError:
                if self._stat() == before:
                    raise
                continue
            if self._stat() == before:
                return value, before
        return self._load(), self._stat()

    def _stat(self) -> _Signature:
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return ()
        return tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in found)
