"""What KubeRay's operator refuses and no schema says.

Written down from the operator's validation (1.7). Each rule is a function from manifests to
complaints; OPERATOR_RULES names them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from support.manifests.documents import Document, Group, Manifests, name_of

Rule = Callable[[Manifests], Iterator[str]]

MAX_RAY_SERVICE_NAME_LENGTH = 47
"""The operator makes longer names of it, which must fit into 63 characters."""

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

RESOURCE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
GATED = ("networkPolicy", "tlsOptions", "historyServerOptions")
"""Fields behind feature gates that are off as KubeRay is installed."""

HEAD_SELECTOR = ("app.kubernetes.io/name", "app.kubernetes.io/created-by", "ray.io/identifier")
"""Labels that the operator gives to a head, and that its Services find it by."""

TLS_ENV = ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
REDIS_ENV = ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS", "REDIS_USERNAME")
REDIS_PARAMS = ("redis-password", "redis-username")
REDIS_ANNOTATIONS = ("ray.io/ft-enabled", "ray.io/external-storage-namespace")


def one_ray_service(manifests: Manifests) -> Iterator[str]:
    """There is one RayService, and its name can be made longer."""
    found = manifests.of_kind("RayService")
    if len(found) != 1:
        yield f"found {len(found)} RayServices, wanted one"
        return
    name = str(found[0]["metadata"]["name"])
    if not DNS_1035.fullmatch(name) or len(name) > MAX_RAY_SERVICE_NAME_LENGTH:
        yield f"name {name!r}: wanted a DNS-1035 label of at most {MAX_RAY_SERVICE_NAME_LENGTH}"


def ray_container_first(manifests: Manifests) -> Iterator[str]:
    """Every group has a container, and Ray's is the first."""
    for group in manifests.groups:
        found = (group.spec.get("template") or {}).get("spec", {}).get("containers") or []
        wanted = "ray-head" if group.is_head else "ray-worker"
        if not found or found[0].get("name") != wanted:
            yield f"{group.name}: the first container is not {wanted}"


def group_names(manifests: Manifests) -> Iterator[str]:
    """Worker groups have names, each its own; the schema lets two share one."""
    names = [group.name for group in manifests.workers]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"worker group {name} is there twice"


def resources_stand_once(manifests: Manifests) -> Iterator[str]:
    """`resources` of a group and those of rayStartParams exclude one another."""
    for group in manifests.groups:
        if group.spec.get("resources") and any(map(group.start_params.get, RESOURCE_PARAMS)):
            yield f"{group.name}: both resources and rayStartParams name resources"


def labels_are_labels(manifests: Manifests) -> Iterator[str]:
    """A group's labels stand in `labels`, and are ones."""
    for group in manifests.groups:
        if "labels" in group.start_params:
            yield f"{group.name}: rayStartParams.labels; use the group's labels"
        for key, value in (group.spec.get("labels") or {}).items():
            if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(str(value)):
                yield f"{group.name}: {key}={value} is no label"


def autoscaler_v2(manifests: Manifests) -> Iterator[str]:
    """Autoscaler v2 is chosen in one place, and owns its pods' lives."""
    cluster = manifests.cluster
    if not cluster.get("enableInTreeAutoscaling"):
        yield "enableInTreeAutoscaling is not true"
    if (cluster.get("autoscalerOptions") or {}).get("version") != "v2":
        yield "autoscalerOptions.version is not v2"
    for group in manifests.groups:
        policy = group.pod.get("restartPolicy")
        if policy not in (None, "Never"):
            yield f"{group.name}: restartPolicy {policy}, wanted Never or none"
        if group.spec.get("suspend"):
            yield f"{group.name}: suspend"
        if "RAY_enable_autoscaler_v2" in group.env():
            yield f"{group.name}: RAY_enable_autoscaler_v2 beside autoscalerOptions.version"


def replica_bounds(manifests: Manifests) -> Iterator[str]:
    """0 <= minReplicas <= replicas <= maxReplicas, and there is something at most."""
    for group in manifests.workers:
        low, now, high = (
            group.spec.get(key, 0) for key in ("minReplicas", "replicas", "maxReplicas")
        )
        if not 0 <= low <= now <= high or high < 1:
            yield f"{group.name}: minReplicas {low}, replicas {now}, maxReplicas {high}"


def redis_in_one_place(manifests: Manifests) -> Iterator[str]:
    """Redis is told of in gcsFaultToleranceOptions and nowhere else."""
    annotations = manifests.ray_service["metadata"].get("annotations") or {}
    yield from (f"annotation {name}" for name in REDIS_ANNOTATIONS if name in annotations)
    for group in manifests.groups:
        yield from (f"{group.name}: env {name}" for name in REDIS_ENV if name in group.env())
        yield from (
            f"{group.name}: rayStartParams.{name}"
            for name in REDIS_PARAMS
            if name in group.start_params
        )


def token_auth(manifests: Manifests) -> Iterator[str]:
    """Ray is told a token by a Secret of a name that an upgrade does not change."""
    auth = manifests.cluster.get("authOptions") or {}
    if auth.get("mode") != "token":
        yield f"authOptions.mode {auth.get('mode')}, wanted token"
    if not auth.get("secretName"):
        yield "authOptions.secretName is missing: each cluster would get a token of its own"
    if auth.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth is refused for a RayService"
    version = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", str(manifests.cluster.get("rayVersion")))
    if version is None or (int(version[1]), int(version[2])) < (2, 52):
        yield f"rayVersion {manifests.cluster.get('rayVersion')}, wanted 2.52.0 or newer"


def upgrade_strategy(manifests: Manifests) -> Iterator[str]:
    """The upgrade is of a known kind, and an incremental one has all it needs."""
    strategy = manifests.ray_service["spec"].get("upgradeStrategy") or {}
    kind = strategy.get("type", "NewCluster")
    if kind not in UPGRADES:
        yield f"upgradeStrategy.type {kind}, wanted one of {', '.join(UPGRADES)}"
    head_service = manifests.cluster["headGroupSpec"].get("headService") or {}
    if (head_service.get("metadata") or {}).get("name"):
        yield "headService.metadata.name is the operator's to give"
    if kind == "NewClusterWithIncrementalUpgrade":
        yield from _incremental(strategy.get("clusterUpgradeOptions") or {})


def _incremental(options: Document) -> Iterator[str]:
    step, surge = options.get("stepSizePercent", -1), options.get("maxSurgePercent", 100)
    if not 0 <= step <= surge <= 100:
        yield f"stepSizePercent {step}, maxSurgePercent {surge}: wanted 0 <= step <= surge <= 100"
    if options.get("intervalSeconds", 0) <= 0:
        yield "intervalSeconds: wanted above 0"
    if not options.get("gatewayClassName"):
        yield "gatewayClassName is missing"


def no_gated_fields(manifests: Manifests) -> Iterator[str]:
    """Nothing asks for a feature that is off as the operator is installed."""
    cluster = manifests.cluster
    yield from (f"{field} is behind a feature gate" for field in GATED if cluster.get(field))
    if (cluster.get("gcsFaultToleranceOptions") or {}).get("backend") == "rocksdb":
        yield "gcsFaultToleranceOptions.backend rocksdb is behind a feature gate"


def tls_left_to_the_operator(manifests: Manifests) -> Iterator[str]:
    """Ray's TLS files and variables are the operator's, where tlsOptions may be switched on."""
    for group in manifests.groups:
        yield from (f"{group.name}: env {name}" for name in TLS_ENV if name in group.env())
        if _mounts(group, "/etc/ray/tls"):
            yield f"{group.name}: a mount at /etc/ray/tls"


def head_is_found(manifests: Manifests) -> Iterator[str]:
    """The head keeps the labels that the Service of the RayService's own name selects it by.

    A label of the template takes the place of the operator's, and the Service selects no pod.
    """
    labels = manifests.groups[0].labels
    yield from (f"head: label {name} is the operator's" for name in HEAD_SELECTOR if name in labels)


def _mounts(group: Group, path: str) -> bool:
    mounts = group.ray_container.get("volumeMounts") or []
    return any(mount.get("mountPath") == path for mount in mounts)


OPERATOR_RULES: tuple[Rule, ...] = (
    ray_container_first,
    group_names,
    resources_stand_once,
    labels_are_labels,
    autoscaler_v2,
    replica_bounds,
    redis_in_one_place,
    token_auth,
    upgrade_strategy,
    no_gated_fields,
    tls_left_to_the_operator,
    head_is_found,
)
"""All but `one_ray_service`, which the others rely on."""


def problems_by_rule(manifests: Manifests, rules: tuple[Rule, ...]) -> Iterator[str]:
    """Apply rules; each complaint begins with the rule's name."""
    found = [f"one_ray_service: {problem}" for problem in one_ray_service(manifests)]
    if found:
        yield from found
        return
    for rule in rules:
        try:
            yield from (f"{rule.__name__}: {problem}" for problem in rule(manifests))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            name = name_of(manifests.ray_service)
            yield f"{rule.__name__}: {name} lacks what the rule reads ({error!r})"
