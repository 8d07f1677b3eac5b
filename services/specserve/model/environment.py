"""What a process's numbers depend on besides weights: the machine, the libraries, this code.

Knows files and package metadata; loads no library that it names.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

from specserve.speculation.planted_faults import VARIABLE

LIBRARIES = ("numpy", "torch", "transformers", "numba")
"""Whose versions decide what comes out of a forward, a draw or an accept test."""

_SOURCES = Path(__file__).resolve().parents[1]


@functools.cache
def code_versions() -> tuple[str, ...]:
    """Return "name=version" of all that computes here, sorted; what is absent is left out.

    A version alone would not tell one checkout from the next, so the sources are named too.
    """
    found = {"python": platform.python_version(), "sources": sources_digest(_SOURCES)}
    if fault := os.environ.get(VARIABLE):
        # No record made with a fault may ever fit a process without it, nor the other way round.
        found["planted_fault"] = fault
    for name in ("specserve", *LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return tuple(f"{name}={version}" for name, version in sorted(found.items()))


def sources_digest(folder: Path) -> str:
    """Return the first 12 hex digits of a SHA-256 over every Python file below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


@functools.cache
def processor_name() -> str:
    """Return the processor's name as its maker gives it; the architecture where it gives none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()
