"""What a change of a RayService makes KubeRay do: apply it in place, or make a second cluster.

After the operator's comparison of cluster configurations (KubeRay 1.7): it leaves out how many pods
there are, and what only the scheduler reads, and takes groups that are added at the end.
"""

from __future__ import annotations

import copy

from support.manifests.documents import Document

_OF_A_GROUP = ("replicas", "minReplicas", "maxReplicas", "scaleStrategy")
_OF_A_POD = ("tolerations", "schedulingGates")


def needs_second_cluster(before: Document, after: Document) -> bool:
    """Tell whether a changed RayService wants GPUs for two clusters at once."""
    old, new = (_compared(service["spec"]["rayClusterConfig"]) for service in (before, after))
    groups, others = old.pop("workerGroupSpecs"), new.pop("workerGroupSpecs")
    return bool(old != new or others[: len(groups)] != groups)


def _compared(cluster: Document) -> Document:
    found = copy.deepcopy(cluster)
    for group in found["workerGroupSpecs"]:
        for name in _OF_A_GROUP:
            group.pop(name, None)
        for name in _OF_A_POD:
            group["template"]["spec"].pop(name, None)
    return found
