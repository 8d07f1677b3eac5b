"""The commands of docs/kubernetes.md do what they say: as far as can be known without a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.manifests.documents import Document, Manifests, build

pytestmark = pytest.mark.slow  # kustomize is a program

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
JOB = "specserve-pull-models"


@pytest.fixture(scope="module")
def everything() -> list[Document]:
    """Return what the largest overlay and the folder of models make."""
    return [*build(K8S / "overlays" / "gpu-pools"), *build(K8S / "models")]


def command(start: str) -> str:
    """Return the one line of the page's blocks that begins so, without its comment."""
    (line,) = re.findall(rf"^ +({re.escape(start)}.*)$", PAGE, re.MULTILINE)
    return re.sub(r"\s+# .*$", "", line)


def test_a_copied_overlay_builds_and_has_the_image(tmp_path: Path) -> None:
    """So has the job that fetches models: nothing is pulled that was not pushed."""
    shutil.copytree(K8S, tmp_path / "k8s")
    lines = [command("export REGISTRY="), command("cp -r k8s/"), command('sed -i "s|newName')]

    subprocess.run(["bash", "-euc", "\n".join(lines)], cwd=tmp_path, check=True)

    pushed = command("docker push ").removeprefix("docker push ")
    image = pushed.replace("$REGISTRY", lines[0].partition("=")[2])
    mine = Manifests(build(tmp_path / "k8s" / "overlays" / "mine"))
    (job,) = [d for d in build(tmp_path / "k8s" / "models") if d["kind"] == "Job"]
    assert f"-t {pushed} ." in command("docker build ")
    assert {group.ray_container["image"] for group in mine.groups} == {image}
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == image
    assert "K8S=k8s/overlays/mine\n" in PAGE
    assert PAGE.count("-k k8s/overlays/mine\n") == 2


def test_every_secret_that_is_read_is_made(everything: list[Document]) -> None:
    """By its name and keys on the page, or by cert-manager; and none is made for nothing."""
    made = {
        (name, key)
        for name, options in re.findall(r"create secret generic (\S+) (--from\S+=\S+)", PAGE)
        for key in re.findall(r"--from-(?:literal|file)=(\w+)", options)
    }
    issued = {d["spec"]["secretName"] for d in everything if d["kind"] == "Certificate"}

    assert {(name, key) for name, key in _read(everything) if name not in issued} == made


def _read(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (Secret, key) of everything in the documents that reads one."""
    if isinstance(value, list):
        for part in value:
            yield from _read(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name == "secretKeyRef":
                yield part["name"], part["key"]
            elif name == "secretRef":
                yield part["name"], "HF_TOKEN"
            elif name == "authOptions":
                yield part["secretName"], "auth_token"  # the operator's name for it
            elif name == "secret" and "secretName" in part:
                yield part["secretName"], "keys"
            else:
                yield from _read(part)


def test_names_on_the_page_are_those_of_the_manifests(everything: list[Document]) -> None:
    names = {(d["kind"], d["metadata"]["name"]) for d in everything}
    (namespace,) = {d["metadata"].get("namespace") for d in everything if d["kind"] == "RayService"}

    assert set(re.findall(r"job(?:/| )([\w-]+-models)", PAGE)) == {JOB}
    assert ("Job", JOB) in names
    assert set(re.findall(r"rayservice[/ ]([\w-]+)", PAGE)) == {"specserve"}
    assert ("RayService", "specserve") in names
    assert set(re.findall(r"http://([\w-]+)\.(\w+):8000", PAGE)) == {
        ("specserve-serve-svc", namespace)
    }
    (allowed,) = [d for d in everything if d["metadata"]["name"] == "specserve-clients"]
    selector = allowed["spec"]["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"]
    (label,) = [f"{key}={value}" for key, value in selector.items()]
    assert command("kubectl label namespace").endswith(f" {label}")


@pytest.mark.parametrize("end", ["SuccessCriteriaMet Complete", "FailureTarget Failed"])
def test_the_wait_for_models_ends_however_the_job_does(tmp_path: Path, end: str) -> None:
    """On the third look here; a failure is no hour of waiting for a success."""
    programs = {
        "kubectl": f'echo x >> looks; test $(wc -l < looks) -lt 3 || printf "{end}"',
        "sleep": ":",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    done = subprocess.run(
        ["bash", "-euc", command("until kubectl")],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stdout.strip() == end
    assert (tmp_path / "looks").read_text() == "x\n" * 3


def test_the_job_is_deleted_before_it_is_applied_again() -> None:
    """A job's template cannot be changed, and it changes with every commit and checksum."""
    delete, apply = (
        command("kubectl -n specserve delete job"),
        command("kubectl apply -k k8s/models"),
    )

    assert f" {JOB} " in delete
    assert "--ignore-not-found" in delete
    assert PAGE.index(delete) < PAGE.index(apply)
