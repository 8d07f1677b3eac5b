"""How pods end: after their requests, by the order of their graces, and not too many at once."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specserve.gateway.config import GatewayConfig
from support.manifests.documents import Group, Manifests, num_replicas
from support.manifests.operator_rules import Rule


def gentle_end(manifests: Manifests) -> Iterator[str]:
    """A pod that ends drains first, and is given longer than the replicas on it are."""
    for group in manifests.workers:
        hook_s = _hook_s(group)
        if hook_s is None:
            yield f"{group.name}: no preStop that drains"
            continue
        grace_s = group.pod.get("terminationGracePeriodSeconds", 30)
        for name, deployment in manifests.deployments_on(group).items():
            serve_s = deployment["graceful_shutdown_timeout_s"]
            if not serve_s < hook_s < grace_s:
                yield (
                    f"{group.name}: graceful_shutdown_timeout_s {serve_s:g} of {name} < drain "
                    f"{hook_s:g} < terminationGracePeriodSeconds {grace_s} does not hold"
                )


def _hook_s(group: Group) -> float | None:
    hook = (group.ray_container.get("lifecycle") or {}).get("preStop") or {}
    words = (hook.get("exec") or {}).get("command") or []
    timeouts = [float(m[1]) for w in words if (m := re.fullmatch(r"--timeout-s=([\d.]+)", w))]
    return timeouts[0] if words[:2] == ["specserve", "drain-node"] and timeouts else None


def answers_end_first(manifests: Manifests) -> Iterator[str]:
    """Neither an old cluster nor one of several gateways is ended before the longest request is.

    Serve ends a gateway at its grace without a word to its clients. One that is alone is an outage
    anyway, and may be ended sooner.
    """
    args = manifests.serve_args.get("gateway") or {}
    request_s = args.get("request_timeout_s", GatewayConfig().request_timeout_s)
    deletion_s = manifests.ray_service["spec"].get("rayClusterDeletionDelaySeconds", 60)
    if deletion_s <= request_s:
        yield f"an upgrade ends the old cluster after {deletion_s} s; requests take {request_s:g} s"
    gateway = manifests.deployments["gateway"]
    grace_s = gateway["graceful_shutdown_timeout_s"]
    if num_replicas(gateway, "min_replicas") > 1 and grace_s <= request_s:
        yield f"a gateway is ended after {grace_s:g} s; requests take {request_s:g} s"


def budgets(manifests: Manifests) -> Iterator[str]:
    """Each worker group has a budget that Kubernetes honours for pods of a custom resource.

    A draft that may be alone has none: drafts can be done without, and a budget of the only pod
    stops every drain of its node.
    """
    found = {}
    for budget in manifests.of_kind("PodDisruptionBudget"):
        labels = budget["spec"]["selector"].get("matchLabels") or {}
        found[labels.get("ray.io/group")] = budget["spec"]
    for group in manifests.workers:
        spec, fewest = found.get(group.name), group.spec["minReplicas"]
        if spec is None:
            if group.name != "draft" or fewest > 1:
                yield f"{group.name}: no PodDisruptionBudget"
            continue
        least = spec.get("minAvailable")
        if not isinstance(least, int) or "maxUnavailable" in spec:
            yield f"{group.name}: a budget over such pods is a whole number of minAvailable"
        elif not 1 <= least <= fewest:
            yield f"{group.name}: minAvailable {least}, minReplicas {fewest}"
        elif group.name == "draft" and least == fewest:
            yield f"draft: minAvailable {least} of {fewest} stops every drain; drafts are optional"
        selector = spec["selector"]["matchLabels"]
        if not selector.items() <= group.labels.items():
            yield f"{group.name}: the budget's selector {selector} matches none of its pods"


END_RULES: tuple[Rule, ...] = (gentle_end, answers_end_first, budgets)
