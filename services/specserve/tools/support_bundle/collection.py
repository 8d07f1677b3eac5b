"""What a bundle is made of: files by name, and what could not be got, with the reason.

Knows names and text; knows no source and no archive.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from specserve.errors import SpecServeError
from specserve.tools.support_bundle.redaction import Redactor

T = TypeVar("T")


@dataclass(slots=True)
class Collection:
    """Everything that was got, secrets taken out."""

    redactor: Redactor
    files: dict[str, str] = field(default_factory=dict)
    """{path in the bundle: text}."""
    missing: dict[str, str] = field(default_factory=dict)
    """{what was wanted: why it is not there}."""
    num_failures: int = 0
    """Of the missing ones, those that were asked for by name."""

    def add(self, name: str, value: object) -> None:
        """Add text as it is, anything else as JSON."""
        text = value if isinstance(value, str) else json.dumps(value, indent=1) + "\n"
        self.files[name] = self.redactor.text(text)

    def leave_out(self, name: str, reason: str) -> None:
        """Note what nobody asked for."""
        self.missing[name] = self.redactor.text(reason)

    def take(
        self, name: str, source: Callable[[], T], show: Callable[[T], object] = lambda value: value
    ) -> T | None:
        """Ask a source, and add what it says; one that fails fails nothing else.

        Args:
            show: makes of it what is added.

        Returns:
            What it said; None where it failed.
        """
        try:
            value = source()
        except SpecServeError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - a bundle is made where something is broken
            reason = f"{type(error).__name__}: {error}"
        else:
            self.add(name, show(value))
            return value
        self.missing[name] = self.redactor.text(" ".join(reason.split()))
        self.num_failures += 1
        return None

    def contents(self, made_by: str, notes: list[str]) -> str:
        """Write the list of everything that is here, and of what is not."""
        width = max(map(len, (*self.files, *self.missing, "contents.txt")))
        lines = [made_by, *notes, "", "It holds:"]
        lines += [
            f"  {name.ljust(width)}  {len(text.encode())} bytes"
            for name, text in sorted(self.files.items())
        ]
        lines += ["", "It does not hold:" if self.missing else "Nothing is missing."]
        lines += [f"  {name.ljust(width)}  {why}" for name, why in sorted(self.missing.items())]
        return "\n".join(lines) + "\n"
