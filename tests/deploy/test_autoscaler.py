"""Ray's own autoscaler, given the manifests and what Serve asks for: it starts pods of every group.

No cluster is asked: the autoscaler reads the RayCluster and plans which pods to start for a demand.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ray._raylet import IMPLICIT_RESOURCE_PREFIX
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingReply, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ResourceRequest
from ray.core.generated.common_pb2 import LabelSelectorOperator

from support.manifests.documents import Document, Manifests, build, num_replicas

pytestmark = pytest.mark.slow  # kustomize is a program

OVERLAYS = Path(__file__).parents[2] / "k8s" / "overlays"


def demand_of(name: str, deployment: Document) -> ResourceRequest:
    """Return what Serve asks Ray for one replica."""
    actor = deployment["ray_actor_options"]
    resources = {"CPU": actor["num_cpus"]} | (
        {"GPU": actor["num_gpus"]} if actor["num_gpus"] else {}
    )
    if most := deployment.get("max_replicas_per_node"):
        resources[f"{IMPLICIT_RESOURCE_PREFIX}specserve:{name}"] = 1 / most
    selector = [
        (label, LabelSelectorOperator.LABEL_OPERATOR_IN, [value])
        for label, value in actor["label_selector"].items()
    ]
    return ResourceRequestUtil.make(resources, label_selectors=[selector])


def plan(manifests: Manifests) -> SchedulingReply:
    """Let the autoscaler plan an empty cluster for the most replicas that each pool may have."""
    read = _derive_autoscaling_config_from_ray_cr(
        {"metadata": {"name": "specserve", "namespace": "specserve"}, "spec": manifests.cluster}
    )
    config = AutoscalingConfig(read, skip_content_hash=True)
    demands = [
        demand_of(name, deployment)
        for name, deployment in manifests.deployments.items()
        for _ in range(num_replicas(deployment, "max_replicas"))
    ]
    return ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=config.disable_launch_config_check(),
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count(demands),
        )
    )


@pytest.mark.parametrize("overlay", ["cpu-embedded", "gpu-pools", "gpu-small"])
def test_every_pool_grows_to_its_most(overlay: str) -> None:
    """No demand is without a group, and no group gets more pods than its replicas need."""
    manifests = Manifests(build(OVERLAYS / overlay))

    reply = plan(manifests)

    assert list(reply.infeasible_resource_requests) == []
    wanted = {
        group.name: max(
            num_replicas(deployment, "max_replicas")
            for deployment in manifests.deployments_on(group).values()
        )
        for group in manifests.workers
    }
    assert {request.instance_type: request.count for request in reply.to_launch} == wanted


def test_without_labels_of_its_groups_no_pool_grows() -> None:
    """What `pools_can_grow` is there for: pods up to minReplicas, and every demand in vain."""
    manifests = Manifests(build(OVERLAYS / "gpu-pools"))
    for group in manifests.workers:
        group.spec.pop("labels")

    reply = plan(manifests)

    started = {request.instance_type: request.count for request in reply.to_launch}
    assert started == {group.name: group.spec["minReplicas"] for group in manifests.workers}
    assert len(reply.infeasible_resource_requests) == 8 + 16 + 8 + 8
