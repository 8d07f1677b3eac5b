"""`make policy`: checkov over the manifests, the RayService's pods taken out of it as pods.

checkov knows no RayService. It runs in an environment of its own, offline; first over pods that are
spoilt, for a check that finds nothing there is none.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from support.manifests.documents import BuildFailure, Document, Manifests, build

SKIPPED = {
    "CKV_K8S_8": "liveness probes: KubeRay's operator adds them",
    "CKV_K8S_9": "readiness probes, too",
    "CKV_K8S_15": "imagePullPolicy Always: a tag is a version here, and never moves",
    "CKV_K8S_43": "digests: they come with `make pin-digests`, from who has a registry",
}
"""Checks that are left out, each with its reason."""

ALLOWED = {("CKV_K8S_38", "head"): "the autoscaler in the head's pod asks the Kubernetes API"}
"""{(check, pod): why it may}."""

SABOTAGE: dict[str, Callable[[Any], object]] = {
    "CKV_K8S_16": lambda pod: _first(pod)["securityContext"].update(privileged=True),
    "CKV_K8S_19": lambda pod: pod["spec"].update(hostNetwork=True),
    "CKV_K8S_20": lambda pod: _first(pod)["securityContext"].update(allowPrivilegeEscalation=True),
    "CKV_K8S_22": lambda pod: _first(pod)["securityContext"].update(readOnlyRootFilesystem=False),
    "CKV_K8S_13": lambda pod: _first(pod)["resources"]["limits"].pop("memory"),
    "CKV_K8S_14": lambda pod: _first(pod).update(image="specserve:latest"),
    "CKV_K8S_38": lambda pod: pod["spec"].update(automountServiceAccountToken=True),
}
"""{check: what it is there to find}; each must be found in a spoilt copy of one pod."""


def plain_documents(documents: list[Document]) -> list[Document]:
    """Return the documents, with a Pod of the head and of each group in place of the RayService."""
    manifests = Manifests(documents)
    namespace = manifests.ray_service["metadata"].get("namespace")
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": group.name,
                "namespace": namespace,
                "labels": group.labels,
            },
            "spec": copy.deepcopy(group.pod),
        }
        for group in manifests.groups
    ]
    return [document for document in documents if document["kind"] != "RayService"] + pods


def checkov_problems(checkov: Path, documents: list[Document]) -> set[tuple[str, str, str]]:
    """Return (check, resource, what it wants) of everything that checkov finds fault with.

    Raises:
        RuntimeError: it did not run, or looked at nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifests.yaml"
        path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
        done = subprocess.run(
            [
                *(str(checkov), "--file", str(path), "--framework", "kubernetes"),
                *("--skip-download", "--quiet", "--compact", "--output", "json"),
                *("--skip-check", ",".join(SKIPPED)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        report = json.loads(done.stdout)
        summary, failed = report["summary"], report["results"]["failed_checks"]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"checkov: {done.stdout[-500:]}{done.stderr[-500:]}") from error
    if not summary["passed"] or summary["parsing_errors"]:
        raise RuntimeError(f"checkov looked at nothing: {summary}")
    return {
        (one["check_id"], one["resource"].rpartition(".")[2], one["check_name"])
        for one in failed
        if (one["check_id"], one["resource"].rpartition(".")[2]) not in ALLOWED
    }


def sabotage_problems(checkov: Path, documents: list[Document]) -> Iterator[str]:
    """Yield every check that finds nothing in a pod that is spoilt for it."""
    pod = next(one for one in documents if one["kind"] == "Pod" and _name(one) == "target")
    spoilt = []
    for check, spoil in SABOTAGE.items():
        copied = copy.deepcopy(pod)
        copied["metadata"]["name"] = check.lower().replace("_", "-")
        spoil(copied)
        spoilt.append(copied)
    found = {(check, name) for check, name, _ in checkov_problems(checkov, spoilt)}
    for one, check in zip(spoilt, SABOTAGE, strict=True):
        if (check, _name(one)) not in found:
            yield f"{check} does not find its fault"


def main(arguments: list[str]) -> int:
    """Check folders: the path of checkov, then the folders."""
    checkov, *folders = map(Path, arguments)
    try:
        made = {folder: plain_documents(build(folder)) for folder in folders}
    except BuildFailure as error:
        print(f"kustomize: {error}")
        return 1
    found = [f"planted: {one}" for one in sabotage_problems(checkov, made[folders[0]])]
    print(f"checkov finds {len(SABOTAGE) - len(found)} of {len(SABOTAGE)} planted faults")
    for folder, documents in made.items():
        problems = sorted(checkov_problems(checkov, documents))
        found += [f"{folder}: {check} {name}: {what}" for check, name, what in problems]
        print(f"{folder}: {len(problems)} problems in {len(documents)} documents")
    print("".join(f"{one}\n" for one in found), end="")
    return 1 if found else 0


def _first(pod: Any) -> Any:
    return pod["spec"]["containers"][0]


def _name(document: Document) -> str:
    return str(document["metadata"]["name"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
