"""What a folder of manifests makes: its documents, as the cluster would be given them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

NODE_GROUP = "ray.io/node-group"
"""Ray's label that deployments select their nodes by."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where it was built


class BuildFailure(Exception):
    """kustomize refused the folder."""


@dataclass(frozen=True, slots=True)
class Group:
    """The head or one group of workers of a RayService."""

    name: str
    """`head`, or the worker group's name."""
    spec: Document
    """headGroupSpec, or an entry of workerGroupSpecs."""

    @property
    def is_head(self) -> bool:
        """Whether it is the head."""
        return self.name == "head"

    @property
    def pod(self) -> Document:
        """The pod template's spec."""
        spec: Document = self.spec["template"]["spec"]
        return spec

    @property
    def ray_container(self) -> Document:
        """The container that the operator runs Ray in: the first."""
        container: Document = self.pod["containers"][0]
        return container

    @property
    def labels(self) -> dict[str, str]:
        """Labels that its pods have in the cluster: those of the template, and the operator's."""
        metadata = self.spec["template"].get("metadata") or {}
        return {
            **(metadata.get("labels") or {}),
            **(self.spec.get("labels") or {}),
            "ray.io/group": "headgroup" if self.is_head else self.name,
            "ray.io/node-type": "head" if self.is_head else "worker",
            "ray.io/is-ray-node": "yes",
        }

    @property
    def start_params(self) -> dict[str, str]:
        """Parameters of `ray start`."""
        return self.spec.get("rayStartParams") or {}

    def env(self) -> dict[str, Document]:
        """Return the Ray container's environment by name."""
        return {entry["name"]: entry for entry in self.ray_container.get("env") or []}


class Manifests:
    """Documents that belong together, with one RayService among them."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents

    def of_kind(self, kind: str) -> list[Document]:
        """Return the documents of one kind."""
        return [document for document in self.documents if document.get("kind") == kind]

    @cached_property
    def ray_service(self) -> Document:
        """The RayService; an empty one where there is none or more than one."""
        found = self.of_kind("RayService")
        return found[0] if len(found) == 1 else {}

    @property
    def cluster(self) -> Document:
        """spec.rayClusterConfig."""
        cluster: Document = self.ray_service["spec"]["rayClusterConfig"]
        return cluster

    @property
    def groups(self) -> list[Group]:
        """The head, then the worker groups."""
        workers = [
            Group(spec.get("groupName", ""), spec)
            for spec in self.cluster.get("workerGroupSpecs") or []
        ]
        return [Group("head", self.cluster["headGroupSpec"]), *workers]

    @property
    def workers(self) -> list[Group]:
        """The worker groups."""
        return self.groups[1:]

    @property
    def serve_config(self) -> Document:
        """What spec.serveConfigV2 says."""
        config: Document = load(self.ray_service["spec"]["serveConfigV2"])
        return config

    @property
    def serve_args(self) -> Document:
        """The arguments of the application's builder."""
        args: Document = self.serve_config["applications"][0]["args"]
        return args

    @property
    def deployments(self) -> dict[str, Document]:
        """Serve's deployments by name."""
        found = self.serve_config["applications"][0]["deployments"]
        return {deployment["name"]: deployment for deployment in found}

    def deployments_on(self, group: Group) -> dict[str, Document]:
        """Return the deployments whose replicas go to a group's pods."""
        return {
            name: deployment
            for name, deployment in self.deployments.items()
            if node_group(deployment) == group.name
        }


def node_group(deployment: Document) -> str | None:
    """Return the name of the group that a deployment selects."""
    selector = deployment["ray_actor_options"].get("label_selector") or {}
    found: str | None = selector.get(NODE_GROUP)
    return found


def num_replicas(deployment: Document, bound: str) -> int:
    """Return a deployment's `min_replicas` or `max_replicas`."""
    scaling = deployment.get("autoscaling_config")
    return int(scaling[bound] if scaling else deployment["num_replicas"])


def build(folder: Path) -> list[Document]:
    """Return what `kubectl apply -k` would be given, or what the files of a folder hold.

    Raises:
        BuildFailure: kustomize's own words.
    """
    return read(text_of(folder).decode())


def text_of(folder: Path) -> bytes:
    """Return the same as text: the very bytes that `kubectl kustomize` prints.

    Raises:
        BuildFailure: kustomize's own words.
    """
    if not (folder / "kustomization.yaml").is_file():
        paths = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
        return b"\n---\n".join(path.read_bytes() for path in paths)
    kubectl = next(iter(kubectls()), None)
    if kubectl is None:
        raise BuildFailure("there is no kubectl; `make setup` installs one")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, check=False)
    if done.returncode:
        raise BuildFailure(done.stderr.decode(errors="replace").strip())
    return done.stdout


def kubectls() -> list[str]:
    """Return each kubectl there is: the one that is installed with the tests, the machine's."""
    beside = Path(sys.executable).with_name("kubectl")
    found = [str(beside)] if beside.is_file() else []
    others = (shutil.which("kubectl", path=folder) for folder in os.get_exec_path())
    return list(dict.fromkeys([*found, *filter(None, others)]))


def read(text: str) -> list[Document]:
    """Read YAML documents, empty ones left out."""
    return [document for document in yaml.load_all(text, _LOADER) if document]


def load(text: str) -> Any:
    """Read one YAML document."""
    return yaml.load(text, _LOADER)  # noqa: S506 - a safe loader, whichever it is


def name_of(document: Document) -> str:
    """Return `Kind/name` for messages."""
    return f"{document.get('kind', '?')}/{(document.get('metadata') or {}).get('name', '?')}"


def quantity(text: str | float | None) -> float:
    """Read a Kubernetes quantity such as 500m, 16Gi or 2."""
    match = re.fullmatch(r"([0-9.]+)(m|k|M|G|T|Ki|Mi|Gi|Ti)?", str(text))
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    units = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    binary = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
    return float(match[1]) * ({**units, **binary}[match[2]] if match[2] else 1.0)


def containers(group: Group) -> Iterator[Document]:
    """Yield every container of a pod, those that run first included."""
    yield from group.pod.get("initContainers") or []
    yield from group.pod.get("containers") or []
