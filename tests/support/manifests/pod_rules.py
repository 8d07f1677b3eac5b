"""What our pods promise: they may do little, have room, and are spread."""

from __future__ import annotations

import re
from collections.abc import Iterator

from support.manifests.documents import Document, Group, Manifests, containers, quantity
from support.manifests.operator_rules import Rule

SHM_MARGIN_BYTES = 128 * 2**20
"""What else lies in /dev/shm beside Ray's object store."""


def restricted(manifests: Manifests) -> Iterator[str]:
    """Every container keeps the `restricted` pod security standard, and its root is read-only."""
    for group in manifests.groups:
        yield from _restricted_pod(group)
        for container in containers(group):
            yield from _restricted_container(container, f"{group.name}/{container['name']}")
    autoscaler = manifests.cluster.get("autoscalerOptions") or {}
    yield from _restricted_container(autoscaler, "autoscaler")


def _restricted_pod(group: Group) -> Iterator[str]:
    security = group.pod.get("securityContext") or {}
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
        yield f"{group.name}: may run as root"
    if (security.get("seccompProfile") or {}).get("type") != "RuntimeDefault":
        yield f"{group.name}: no seccomp profile"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if group.pod.get(key):
            yield f"{group.name}: {key}"
    if not group.is_head and group.pod.get("automountServiceAccountToken") is not False:
        yield f"{group.name}: workers ask the Kubernetes API nothing and have a token for it"
    for volume in group.pod.get("volumes") or []:
        if "hostPath" in volume:
            yield f"{group.name}: volume {volume['name']} is the host's"


def _restricted_container(container: Document, name: str) -> Iterator[str]:
    security = container.get("securityContext") or {}
    if security.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: may gain privileges"
    if security.get("readOnlyRootFilesystem") is not True:
        yield f"{name}: its root can be written"
    if (security.get("capabilities") or {}).get("drop") != ["ALL"]:
        yield f"{name}: keeps capabilities"
    if security.get("privileged") or security.get("runAsUser") == 0:
        yield f"{name}: privileged"


def writable_places(manifests: Manifests) -> Iterator[str]:
    """The root is read-only: /tmp, the home and /dev/shm are volumes, and no mount lacks one."""
    for group in manifests.groups:
        volumes = {volume["name"]: volume for volume in group.pod.get("volumes") or []}
        for container in containers(group):
            for mount in container.get("volumeMounts") or []:
                if mount["name"] not in volumes:
                    yield f"{group.name}/{container['name']}: no volume {mount['name']}"
        mounts = {m["mountPath"]: m for m in group.ray_container.get("volumeMounts") or []}
        home = (group.env().get("HOME") or {}).get("value", "/root")
        for path in ("/tmp", home, "/dev/shm"):
            volume = volumes.get((mounts.get(path) or {}).get("name", ""), {})
            if "emptyDir" not in volume:
                yield f"{group.name}: {path} is no emptyDir"


def shared_memory(manifests: Manifests) -> Iterator[str]:
    """/dev/shm holds Ray's object store and is paid for from the memory limit, request = limit."""
    for group in manifests.groups:
        resources = group.ray_container.get("resources") or {}
        limit = (resources.get("limits") or {}).get("memory")
        if limit is None or (resources.get("requests") or {}).get("memory") != limit:
            yield f"{group.name}: memory requested and memory limit differ"
            continue
        store = float(group.start_params.get("object-store-memory", "inf"))
        (shm,) = [v for v in group.pod["volumes"] if (v.get("emptyDir") or {}).get("medium")]
        size = quantity(shm["emptyDir"].get("sizeLimit", "0"))
        if store + SHM_MARGIN_BYTES > size:
            yield f"{group.name}: /dev/shm of {size:.0f} bytes for an object store of {store:.0f}"
        if size * 2 > quantity(limit):
            yield f"{group.name}: /dev/shm may take more than half of the memory limit {limit}"


def idle_head(manifests: Manifests) -> Iterator[str]:
    """The head has nothing to give to a replica, and is in no Service for requests."""
    head = manifests.groups[0]
    for name in ("num-cpus", "num-gpus"):
        if head.start_params.get(name) != "0":
            yield f"head: {name} {head.start_params.get(name)}, wanted 0"
    if manifests.ray_service["spec"].get("excludeHeadPodFromServeSvc") is not True:
        yield "excludeHeadPodFromServeSvc is not true"


def spread(manifests: Manifests) -> Iterator[str]:
    """Each worker group's pods are spread over zones and machines, counted per cluster."""
    for group in manifests.workers:
        keys = set()
        for constraint in group.pod.get("topologySpreadConstraints") or []:
            labels = (constraint.get("labelSelector") or {}).get("matchLabels") or {}
            if labels.get("ray.io/group") != group.name:
                yield f"{group.name}: spread counts the pods of {labels}"
            if "ray.io/cluster" not in (constraint.get("matchLabelKeys") or []):
                yield f"{group.name}: spread counts pods of other clusters"
            keys.add(constraint["topologyKey"])
        missing = {"topology.kubernetes.io/zone", "kubernetes.io/hostname"} - keys
        if missing:
            yield f"{group.name}: not spread over {', '.join(sorted(missing))}"


def images(manifests: Manifests) -> Iterator[str]:
    """One image everywhere, with a tag that is a version."""
    names = {c.get("image", "") for group in manifests.groups for c in containers(group)}
    if len(names) != 1:
        yield f"found the images {', '.join(sorted(names))}, wanted one for head and workers"
    for name in names:
        tag = name.rpartition("/")[2].partition("@")[0].partition(":")[2]
        if tag in ("", "latest"):
            yield f"{name}: no tag of a version"


def secrets_stay_out(manifests: Manifests) -> Iterator[str]:
    """No secret value is written down: they come from Secrets that the operator of it all makes."""
    yield from (f"Secret {s['metadata']['name']}" for s in manifests.of_kind("Secret"))
    for group in manifests.groups:
        for name, entry in group.env().items():
            if re.search(r"TOKEN|PASSWORD|SECRET|API_KEY", name) and entry.get("value"):
                yield f"{group.name}: {name} has its value in the manifest"
    redis = (manifests.cluster.get("gcsFaultToleranceOptions") or {}).get("redisPassword") or {}
    if redis.get("value"):
        yield "redisPassword has its value in the manifest"


POD_RULES: tuple[Rule, ...] = (
    restricted,
    writable_places,
    shared_memory,
    idle_head,
    spread,
    images,
    secrets_stay_out,
)
