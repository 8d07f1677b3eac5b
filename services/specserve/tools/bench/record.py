"""The record of a run: sections that grow while it goes on, written as JSON after every step.

Knows the values and the file; knows no service. A run that is cut short leaves what it has.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from specserve.errors import ConfigurationError
from specserve.tools.bench.conditions import Conditions
from specserve.tools.bench.decision import Decision
from specserve.tools.bench.level import Level
from specserve.tools.bench.statistics import Interval
from specserve.tools.bench.summary import Summary
from specserve.tools.bench.thresholds import Thresholds

SCHEMA = "specserve-bench"
SCHEMA_VERSION = 1
"""Rises when a field changes its meaning or goes away."""


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One proposer over all prompts."""

    method: str
    speculative_config: str
    """JSON."""
    summary: Summary


@dataclass(frozen=True, slots=True)
class AutoResult:
    """One level of automatic length control against the better of always on and always off."""

    level: str
    best: str
    """Name of the better fixed side."""
    ratio: Interval | None
    """Tokens/s of auto over those of the better fixed side."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a sweep may choose."""

    concurrency: int
    num_speculative_tokens: int
    """Fixed K; 0 is target-only. With `dynamic` the most it may choose."""
    dynamic: bool = False

    def __str__(self) -> str:
        k = self.num_speculative_tokens
        how = f"dynamic K up to {k}" if self.dynamic else f"K = {k}" if k else "target-only"
        return f"concurrency {self.concurrency}, {how}"


@dataclass(frozen=True, slots=True)
class SweepStep:
    """One setting tried."""

    stage: str
    """concurrency, fixed K or dynamic K."""
    setting: Setting
    tokens_per_s: float
    ratio: Interval | None
    """Over the setting it was compared with, pair by pair; None in the first stage."""
    verified: bool
    """It replaces the last verified setting."""
    reason: str
    """Why not, when not."""
    kept: Setting
    """The last verified setting after this step."""


@dataclass(slots=True)
class Section:
    """One suite's results."""

    suite: str
    conditions: Conditions | None = None
    thresholds: Thresholds | None = None
    levels: list[Level] = field(default_factory=list)
    methods: list[MethodResult] = field(default_factory=list)
    auto: list[AutoResult] = field(default_factory=list)
    steps: list[SweepStep] = field(default_factory=list)
    chosen: Setting | None = None
    """Where a sweep ended."""
    decision: Decision | None = None
    notes: list[str] = field(default_factory=list)
    """What a reader must know besides the figures."""
    complete: bool = False


@dataclass(slots=True)
class Record:
    """One run."""

    command: str
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    sections: list[Section] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """Of the suites that print single figures."""
    path: Path | None = None
    """Where the JSON goes; None keeps it in memory."""

    @property
    def complete(self) -> bool:
        """All of it was measured."""
        return all(section.complete for section in self.sections)

    def section(self, suite: str) -> Section:
        """Begin a suite's section."""
        section = Section(suite)
        self.sections.append(section)
        return section

    def values(self) -> dict[str, object]:
        """Return the record as JSON values."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "created_at": self.created_at,
            "command": self.command,
            "complete": self.complete,
            "sections": [_values(section) for section in self.sections],
            "figures": self.figures,
        }

    def save(self) -> None:
        """Write the JSON file, whole or not at all."""
        if self.path is not None:
            write_text(self.path, json.dumps(self.values(), indent=2) + "\n", "--json")


def _values(section: Section) -> dict[str, object]:
    values = {
        item.name: _plain(getattr(section, item.name)) for item in dataclasses.fields(section)
    }
    if section.conditions is not None:
        values["fingerprint"] = section.conditions.fingerprint
    return values


def _plain(value: object) -> object:
    if isinstance(value, Thresholds):
        return value.model_dump()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def write_text(path: Path, text: str, flag: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        ConfigurationError: it cannot be written; names the flag.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{flag}: {path}: {error.strerror}") from error


def require_writable(path: Path | None, flag: str) -> None:
    """Refuse a report path before an hour is spent on what cannot be written.

    Raises:
        ConfigurationError: its folder is missing or closed; names the flag.
    """
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{flag}: cannot write {path}")
