"""Replicas and worker groups fit one another: who goes where, and who has room for how many."""

from __future__ import annotations

from collections.abc import Iterator

from support.manifests.documents import (
    Document,
    Group,
    Manifests,
    node_group,
    num_replicas,
    quantity,
)
from support.manifests.operator_rules import Rule

GPU = "nvidia.com/gpu"


def pools_fit_groups(manifests: Manifests) -> Iterator[str]:
    """Every replica has a group that can hold it, and every group can hold all of its replicas.

    A demand that no group can meet makes the autoscaler start nodes, or wait, for ever.
    """
    names = [group.name for group in manifests.workers]
    for name, deployment in manifests.deployments.items():
        found = node_group(deployment)
        if found not in names:
            yield f"{name}: node group {found}, wanted one of {', '.join(names)}"
    for group in manifests.workers:
        yield from _fits(group, manifests.deployments_on(group))


def _fits(group: Group, deployments: dict[str, Document]) -> Iterator[str]:
    for name in ("num-cpus", "num-gpus", "resources"):
        if name in group.start_params or group.spec.get("resources"):
            yield f"{group.name}: {name} is said beside the pod's limits, which Ray is told anyway"
    limits = group.ray_container["resources"]["limits"]
    for bound, key in (("minReplicas", "min_replicas"), ("maxReplicas", "max_replicas")):
        pods = group.spec[bound]
        for resource, option in (("cpu", "num_cpus"), (GPU, "num_gpus")):
            room = quantity(limits.get(resource, 0))
            asked = 0.0
            for name, deployment in deployments.items():
                each = deployment["ray_actor_options"].get(option, 0)
                if each > room:
                    yield f"{name}: {option} {each:g}, a pod of {group.name} has {room:g}"
                asked += each * num_replicas(deployment, key)
            if asked > room * pods:
                yield f"{group.name}: {bound} {pods} hold {room * pods:g} {option}, not {asked:g}"
        for name, deployment in deployments.items():
            replicas = num_replicas(deployment, key)
            if replicas > deployment.get("max_replicas_per_node", 10**6) * pods:
                yield f"{name}: {replicas} replicas on {bound} {pods} of a group"


def pools_can_grow(manifests: Manifests) -> Iterator[str]:
    """A group says the labels that its deployments select in its own `labels`.

    Nodes that run have Ray's label for their group without it. Of nodes that it could start, Ray's
    autoscaler knows only what stands there: without it a pool shrinks, and never grows again.
    """
    for group in manifests.workers:
        said = group.spec.get("labels") or {}
        for name, deployment in manifests.deployments_on(group).items():
            selector = deployment["ray_actor_options"]["label_selector"]
            for label, value in selector.items():
                if said.get(label) != value:
                    yield (
                        f"{name}: selects {label}={value}, and the labels of {group.name} have "
                        f"{said.get(label)}"
                    )


PLACEMENT_RULES: tuple[Rule, ...] = (pools_fit_groups, pools_can_grow)
