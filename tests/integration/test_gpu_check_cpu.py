"""The GPU check itself, on a CPU and tiny: from a bare checkout, without what it does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "services"

ABSENT = (
    "__editable__",
    "_specserve",
    "fastapi",
    "gguf",
    "grpc_tools",
    "httptools",
    "llvmlite",
    "numba",
    "openai",
    "ray",
    "specserve",
    "starlette",
    "uvicorn",
)
"""Beginnings of what a machine without Ray, HTTP and compiled forwards does not have."""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that knows the standard library alone; its children are the same."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def run_check(python: Path, path: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the check as a plain module with a search path of its own."""
    return subprocess.run(
        [python, "-m", "specserve.tools.gpu_check", *flags],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONNOUSERSITE": "1", **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_machine_without_the_packages_is_told_which(bare_python: Path) -> None:
    """A list and a way out instead of a traceback."""
    answer = run_check(bare_python, str(SOURCE))

    assert answer.returncode == 2
    assert "pydantic is not installed" in answer.stderr
    assert "torch is not installed" in answer.stderr
    assert "pip download" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.slow
def test_it_runs_from_a_checkout_without_ray_numba_and_http(
    bare_python: Path, tmp_path: Path
) -> None:
    """Every stage passes on tiny shapes without the packages above, and the record has all."""
    site = tmp_path / "site"
    site.mkdir()
    for package in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not package.name.startswith(ABSENT):
            (site / package.name).symlink_to(package)

    answer = run_check(
        bare_python,
        f"{SOURCE}{os.pathsep}{site}",
        "--device=cpu",
        "--tiny",
        OUT=str(tmp_path / "out"),
    )

    assert answer.returncode == 0, answer.stdout + answer.stderr
    record = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    stages = record["stages"]
    assert record["passed"]
    assert list(stages) == [
        "sampler",
        "attention",
        "parity",
        "law",
        "steps",
        "rates",
        "bfloat16",
    ]
    assert {stage["status"] for stage in stages.values()} == {"passed"}, answer.stdout
    assert all(mode["num_drafted_on"] > 0 for mode in stages["parity"]["modes"])
    assert all(case["acceptance_rate"] > 0 for case in stages["law"]["cases"])
    assert len(stages["steps"]["steps"]) == 6
    # On a busy machine a short text may end before its draft is asked: not so in all of them.
    rates = stages["rates"]["rates"]
    assert [rate["num_speculative_tokens"] for rate in rates] == [0, 4] * 3
    assert max(rate["mean_acceptance_length"] for rate in rates) > 1
    assert not any(rate["mean_acceptance_length"] for rate in rates[::2])
