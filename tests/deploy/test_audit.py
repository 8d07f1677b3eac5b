"""`make audit` passes only where somebody answered for every package, and knows nothing bad."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {"torch", "ray", "ruamel.yaml"}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "deploy" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    """Make a report as pip-audit writes one."""
    return {"dependencies": [*rows], "fixes": []}


def fine(name: str) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": []}


def test_all_answered_and_nothing_known_is_a_pass(audit: ModuleType) -> None:
    found = audit.judge(report(fine("torch"), fine("ray"), fine("ruamel-yaml")), NAMES)

    assert found == ([], 0)


def test_a_vulnerability_is_named_with_its_remedy(audit: ModuleType) -> None:
    bad = {**fine("ray"), "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["1.1"]}]}

    problems, code = audit.judge(report(fine("torch"), bad, fine("ruamel.yaml")), NAMES)

    assert code == 1
    assert problems == ["ray 1.0: PYSEC-2026-1; mended in 1.1"]


def test_a_package_without_an_answer_is_no_pass(audit: ModuleType) -> None:
    """What pip-audit says behind a mirror that has packages and no advisories: and exits with 0."""
    skipped = {"name": "ray", "skip_reason": "Dependency not found on PyPI"}

    problems, code = audit.judge(report(fine("torch"), skipped, fine("ruamel.yaml")), NAMES)

    assert code == 2
    assert problems[0].startswith("NOT AUDITED: no advisory service answered for 1 of 3")


@pytest.mark.parametrize("made", [None, {}, {"dependencies": []}])
def test_no_report_is_no_pass(audit: ModuleType, made: dict[str, Any] | None) -> None:
    problems, code = audit.judge(made, NAMES)

    assert code == 2
    assert "3 of 3" in problems[0]


def test_a_vulnerability_outweighs_a_missing_answer(audit: ModuleType) -> None:
    bad = {**fine("ray"), "vulns": [{"id": "X", "fix_versions": []}]}

    problems, code = audit.judge(report(bad), NAMES)

    assert (code, len(problems)) == (1, 2)


def test_what_is_installed_is_listed_without_local_versions(audit: ModuleType) -> None:
    found = dict(audit.installed(sys.executable))

    assert "specserve" not in found
    assert "grpcio" in found
    assert not any("+" in version for version in found.values())


def test_the_tools_are_pinned_and_apart() -> None:
    """They are installed beside what they look at, by exact versions."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "audit", "INSTALLED="],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "pip-audit==" in done.stdout
    assert "cyclonedx-bom==" in done.stdout
    assert ".audit/bin/python deploy/audit.py --python .venv/bin/python" in done.stdout
