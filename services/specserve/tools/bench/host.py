"""The machine a benchmark runs on: what it is, and how busy others keep it meanwhile.

Knows the operating system; knows no service and no model.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("specserve", "torch", "transformers", "grpcio", "numpy", "ray")
"""Whose versions a record keeps."""

_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine."""

    cpu: str
    num_cpus: int
    num_usable_cpus: int
    """That this process may run on."""
    memory_bytes: int
    gpus: tuple[str, ...]
    """Name, memory and driver of each."""
    system: str


def describe_hardware() -> Hardware:
    """Look at the machine."""
    return Hardware(
        cpu=_cpu_name(),
        num_cpus=os.cpu_count() or 1,
        num_usable_cpus=_usable_cpus(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=_gpus(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def describe_versions() -> dict[str, str]:
    """Return the versions of what the figures depend on."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of processes and their children; shared pages count for each."""
    total = 0
    for process in _trees(pids):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


class ProcessorMeter:
    """Measures the processor time that some processes take, and that all others take."""

    def __init__(self, pids: Iterable[int] | None = None) -> None:
        """Start measuring; without pids, this process and all below it."""
        self._pids = [os.getpid()] if pids is None else list(pids)
        self._began = time.perf_counter()
        self._busy = _busy_s()
        self._own = _tree_s(self._pids)

    def own_processors(self) -> float:
        """Return how many processors the processes kept busy since the start."""
        elapsed = time.perf_counter() - self._began
        return (_tree_s(self._pids) - self._own) / elapsed if elapsed > 0 else 0.0

    def others_share(self) -> float:
        """Return the share of all processors that others took since the start, in [0, 1]."""
        elapsed = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        others = (_busy_s() - self._busy) - (_tree_s(self._pids) - self._own)
        return min(1.0, max(0.0, others / elapsed)) if elapsed > 0 else 0.0


def _busy_s() -> float:
    times = psutil.cpu_times()
    # guest time is part of user time already.
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
    return float(sum(times) - idle - getattr(times, "guest_nice", 0.0))


def _tree_s(pids: Iterable[int]) -> float:
    total = 0.0
    for process in _trees(pids):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _trees(pids: Iterable[int]) -> list[psutil.Process]:
    processes: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                processes[each.pid] = each
        except psutil.Error:
            continue
    return list(processes.values())


def _usable_cpus() -> int:
    # Not on every system; where it is missing nothing restricts a process either.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _gpus() -> tuple[str, ...]:
    try:
        done = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
