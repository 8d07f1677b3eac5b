"""Label values that come from outside, held to a number: one per client would grow for ever."""

from __future__ import annotations

OTHER = "other"

MAX_VALUES = 64
"""Combinations that are told apart; what comes later is `other`."""


class BoundedLabels:
    """The first combinations of values keep their names."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._max_values = max_values
        self._known: set[tuple[str, ...]] = set()

    def of(self, *values: str) -> tuple[str, ...]:
        """Return what these values are called."""
        if values not in self._known:
            if len(self._known) >= self._max_values:
                return (OTHER,) * len(values)
            self._known.add(values)
        return values
