"""Processes under test: their output, their descendants, and that none of them is left."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

import specserve

SOURCES = str(Path(specserve.__file__).parents[1])


class CommandLine:
    """One running `specserve` command."""

    def __init__(self, words: Sequence[str], *, stdin: int | None = subprocess.DEVNULL) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specserve.cli", *words],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCES},
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_event(self, event: str, timeout_s: float) -> dict[str, object]:
        """Wait for a line of JSON with this event; fails with the output when it ends without."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no {event!r} event; output:\n" + "\n".join(self.output))
            self.output.append(line)
            if line.startswith("{"):
                fields: dict[str, object] = json.loads(line)
                if fields.get("event") == event:
                    return fields

    def descendants(self) -> list[psutil.Process]:
        """Return every process below this one, and itself."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; returns the exit code. `output` is whole afterwards."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        while (line := self._lines.get(timeout=timeout_s)) is not None:
            self.output.append(line)
        return code

    def kill(self) -> None:
        """End it and everything below it, whatever state it is in."""
        if self.process.poll() is None:
            for process in reversed(self.descendants()):
                if process.is_running():
                    process.kill()
            self.process.wait(10)
        self._reader.join(10)


def left_running(processes: Sequence[psutil.Process], timeout_s: float = 2.0) -> list[str]:
    """Return the command lines of those that still run, after a moment for the last to go."""
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    return [
        " ".join(process.cmdline())[:120]
        for process in alive
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
