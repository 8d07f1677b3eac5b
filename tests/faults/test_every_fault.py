"""Every deliberate fault, planted in real services, found by the command itself: `make faults`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specserve
from specserve.speculation.planted_faults import SWITCH, SWITCH_VALUE, VARIABLE, Fault

SOURCES = str(Path(specserve.__file__).parents[1])
BIAS = "0.015"
"""A ninth of the default's draws."""


def verify(tmp_path: Path, fault: Fault | None) -> tuple[int, dict[str, Any]]:
    """Run `specserve verify --suite distribution`; give its exit code and its report."""
    planted = {} if fault is None else {VARIABLE: fault.value, SWITCH: SWITCH_VALUE}
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "specserve.cli", "verify", "--suite", "distribution"),
            *("--bias", BIAS, "--json", str(report)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": SOURCES, **planted},
    )
    assert report.exists(), done.stderr
    return done.returncode, json.loads(report.read_text())


@pytest.mark.parametrize("fault", [None, Fault.ZERO_UNIFORMS], ids=["none", "harmless"])
def test_without_a_harmful_fault_it_passes(tmp_path: Path, fault: Fault | None) -> None:
    """False alarm of each run: 1e-4."""
    code, report = verify(tmp_path, fault)

    assert code == 0
    assert report["passed"] is True


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault != Fault.ZERO_UNIFORMS])
def test_a_planted_fault_fails_it(tmp_path: Path, fault: Fault) -> None:
    """Exit status 1, and the report says which case; target-only, which has no draft, still holds
    except where the fault is the target's own affair.
    """
    code, report = verify(tmp_path, fault)

    assert code == 1
    failed = [case["case"] for case in report["cases"] if not case["passed"]]
    assert failed
    assert "target-only" not in failed
    if fault is Fault.ACCEPT_ON_EQUALITY:
        assert any(case["num_impossible"] for case in report["cases"])
