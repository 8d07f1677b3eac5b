"""Does a second run agree with the first? Compares a record with an earlier one's JSON.

Ratios are compared, never speeds: another day's machine is another machine. Pure, but for the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.errors import ConfigurationError
from specserve.tools.bench.record import SCHEMA, SCHEMA_VERSION, Record
from specserve.tools.bench.statistics import relative_difference


@dataclass(frozen=True, slots=True)
class Agreement:
    """How one figure came out twice."""

    figure: str
    before: float
    now: float
    tolerance: float
    agrees: bool


@dataclass(frozen=True, slots=True)
class Repeat:
    """How two runs compare."""

    differing_conditions: tuple[str, ...]
    """What was not alike; with any, the figures need not agree."""
    agreements: tuple[Agreement, ...]

    @property
    def agrees(self) -> bool:
        """All conditions were alike and all figures agree."""
        return not self.differing_conditions and all(each.agrees for each in self.agreements)


def read_record(path: Path) -> dict[str, Any]:
    """Read an earlier run's JSON.

    Raises:
        ConfigurationError: it is no record, or one of another schema version.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--compare: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"--compare: {path}: not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise ConfigurationError(f"--compare: {path}: a record of `specserve bench` was wanted")
    if values.get("schema_version") != SCHEMA_VERSION:
        raise ConfigurationError(
            f"--compare: {path}: schema version {values.get('schema_version')}, "
            f"{SCHEMA_VERSION} was wanted"
        )
    return values


def compare_records(before: dict[str, Any], now: Record, tolerance: float) -> Repeat:
    """Compare all ratios and acceptance lengths that both runs have.

    Args:
        tolerance: how far two figures may lie apart, in shares of the smaller.

    Raises:
        ConfigurationError: the two have no figure in common.
    """
    # Through text, so that tuples are lists on both sides.
    values = json.loads(json.dumps(now.values()))
    old, new = dict(_figures(before)), dict(_figures(values))
    shared = [name for name in new if name in old]
    if not shared:
        raise ConfigurationError("--compare: the two runs have no figure in common")
    agreements = []
    for name in shared:
        difference = relative_difference(old[name], new[name])
        agreements.append(Agreement(name, old[name], new[name], tolerance, difference <= tolerance))
    return Repeat(tuple(_differing(before, values)), tuple(agreements))


def _figures(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for section in values["sections"]:
        suite = section["suite"]
        for level in section["levels"]:
            pacing = level["pacing"]
            at = pacing["concurrency"] or f"{pacing['arrival_rate']} requests/s"
            for each in level["comparisons"]:
                if each["ratio"] is not None:
                    yield (
                        f"{suite} at {at}: {each['left']} / {each['right']}",
                        each["ratio"]["value"],
                    )
        for result in section["methods"]:
            accepted = result["summary"]["acceptance"]
            if accepted and accepted["mean_acceptance_length"]:
                yield f"{suite}: {result['method']}", accepted["mean_acceptance_length"]


def _differing(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    old = {section["suite"]: section for section in before["sections"]}
    for section in now["sections"]:
        other = old.get(section["suite"])
        if other is None or other.get("fingerprint") == section.get("fingerprint"):
            continue
        theirs, ours = (each["conditions"] or {} for each in (other, section))
        for name in ours:
            if _stripped(ours[name]) != _stripped(theirs.get(name)):
                yield f"{section['suite']}: {name}"


def _stripped(value: Any) -> Any:
    """Leave out what is no condition: memory in use, and where a system was reached."""
    if isinstance(value, list):
        return [_stripped(item) for item in value]
    if isinstance(value, dict):
        left_out = ("resident_bytes", "address")
        return {key: _stripped(item) for key, item in value.items() if key not in left_out}
    return value
