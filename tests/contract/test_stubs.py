"""The checked-in stubs are what the proto files generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUBS = Path("specserve/rpc/v1")


@pytest.mark.slow
def test_checked_in_stubs_are_what_the_contract_generates(tmp_path: Path) -> None:
    """Every stub equals a fresh one byte for byte, and none is left over from a removed file."""
    subprocess.run([sys.executable, ROOT / "protos" / "generate.py", tmp_path], check=True)

    fresh = {path.name: path.read_bytes() for path in (tmp_path / STUBS).iterdir()}
    checked_in = {
        path.name: path.read_bytes()
        for path in (ROOT / "services" / STUBS).iterdir()
        if path.suffix in {".py", ".pyi"} and path.name != "__init__.py"
    }
    assert sorted(checked_in) == sorted(fresh)
    stale = sorted(name for name, content in fresh.items() if checked_in[name] != content)
    assert not stale, f"run `make protos`: {stale} differ from what protos/ generates"
