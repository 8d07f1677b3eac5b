"""What `gpu-check` needs to run from a checkout: packages and their oldest versions.

Uses the standard library alone, so that a bare machine gets a list instead of a traceback. Knows
distributions; imports none of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

NEEDED = {
    "annotated-types": (0, 6),
    "grpcio": (1, 85, 1),
    "grpcio-health-checking": (1, 85, 1),
    "grpcio-reflection": (1, 85, 1),
    "huggingface-hub": (1, 0),
    "jinja2": (3, 1),
    "numpy": (2, 0),
    "opentelemetry-api": (1, 40),
    "opentelemetry-sdk": (1, 40),
    "opentelemetry-semantic-conventions": (0, 60),
    "prometheus-client": (0, 22),
    "protobuf": (7, 35, 1),
    "pydantic": (2, 10),
    "pydantic-core": (2, 27),
    "safetensors": (0, 5),
    "tokenizers": (0, 22),
    "torch": (2, 9),
    "transformers": (5, 17),
    "typing-extensions": (4, 12),
    "typing-inspection": (0, 4),
}
"""Oldest version of each distribution that the services import without Ray, HTTP and tracing's
exporter; what only these need (Ray, FastAPI, numba) may be absent."""


_WHEEL_FLAGS = "--no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64"


@dataclass(frozen=True, slots=True)
class Shortage:
    """A package that is missing, or too old."""

    name: str
    found: str
    """Installed version; empty when there is none."""
    wanted: str
    """Oldest version that will do."""

    def __str__(self) -> str:
        found = f"{self.found} is installed" if self.found else "is not installed"
        return f"{self.name} {found}, {self.wanted} or newer is wanted"


def shortages() -> list[Shortage]:
    """List what is missing or too old here."""
    found = []
    for name, wanted in NEEDED.items():
        version = installed(name)
        if not version or _numbers(version) < wanted:
            found.append(Shortage(name, version, ".".join(map(str, wanted))))
    return found


def installed(name: str) -> str:
    """Return a distribution's version; empty when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def advice(missing: list[Shortage]) -> str:
    """Say what is missing, and how a machine without a registry gets it."""
    names = " ".join(shortage.name for shortage in missing)
    return "\n".join(
        [
            "gpu-check cannot start here:",
            *(f"  {shortage}" for shortage in missing),
            "",
            "Where a registry can be reached, fetch the wheels for that machine's Python, e.g.",
            f"  pip download {_WHEEL_FLAGS} -d wheels -c constraints.txt {names}",
            "bring the folder along, and there:",
            "  python3 -m pip install --no-index --no-deps --upgrade --target site wheels/*.whl",
            "  PYTHONPATH=services:site python3 -m specserve.tools.gpu_check",
        ]
    )


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()
