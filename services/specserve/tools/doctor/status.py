"""What a doctor's check says. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How much a check matters."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; serving works."""
    PROBLEM = "problem"
    """Serving would fail, or what is served is slow or wrong."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    name: str
    status: Status
    found: str
    """What was found and, for a problem, what was wanted."""

    def as_json(self) -> dict[str, str]:
        """Return the fields for `--json`."""
        return {"name": self.name, "status": self.status.value, "found": self.found}
