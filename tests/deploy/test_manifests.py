"""The shipped manifests are right, and each check finds the fault that it is for.

No cluster is asked: what a cluster would refuse is known from its schemas, and what KubeRay's
operator would refuse from rules written down after it. Every rule has a sabotaged copy here.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.tools.config import render
from specserve.tools.models import EMBEDDED_DEFAULTS
from support.manifests.__main__ import RULES, main, problems
from support.manifests.documents import BuildFailure, Document, Manifests, build, kubectls, quantity
from support.manifests.network import Place, allows
from support.manifests.operator_rules import problems_by_rule
from support.manifests.policy import SABOTAGE as SPOIL_A_POD
from support.manifests.policy import plain_documents
from support.manifests.schemas import (
    KUBERNETES_VERSIONS,
    kubernetes_problems,
    ray_service_problems,
)
from support.manifests.upgrade import needs_second_cluster

pytestmark = pytest.mark.slow  # kustomize is a program, and Ray Serve's own schemas are imported

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml"))


@pytest.fixture(scope="module")
def crds() -> Path:
    """Return the folder of KubeRay's schemas; CI always has it."""
    folder = os.environ.get("KUBERAY_CRDS")
    if not folder:
        if os.environ.get("CI"):
            pytest.fail("KUBERAY_CRDS is not set")
        pytest.skip("KUBERAY_CRDS names no folder of KubeRay's CRD files")
    return Path(folder)


@pytest.fixture(scope="module")
def pools() -> list[Document]:
    """Return what the largest overlay makes; tests spoil copies of it."""
    return build(K8S / "overlays" / "gpu-pools")


def test_the_overlays_are_these() -> None:
    assert OVERLAYS == ["cpu-embedded", "gpu-pools", "gpu-small"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_is_right(overlay: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every schema and every rule, as `make validate K8S=k8s/overlays/...` applies them; and what
    was looked at is, byte for byte, what each kubectl of this machine would apply.

    KubeRay's schema is left out where it is not at hand; CI always has it.
    """
    assert os.environ.get("KUBERAY_CRDS") or not os.environ.get("CI"), "KUBERAY_CRDS is not set"
    folder = K8S / "overlays" / overlay

    code = main([str(folder)])

    told = capsys.readouterr().out
    assert code == 0, told
    for kubectl in kubectls():
        applied = subprocess.run([kubectl, "kustomize", folder], capture_output=True, check=True)
        digest = hashlib.sha256(applied.stdout).hexdigest()
        assert told.endswith(f"{folder}: 0 problems in sha256:{digest}\n"), kubectl


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_config_is_rendered_from_the_overlays_settings(overlay: str) -> None:
    """The settings are the one source; `specserve serve --config` takes the same file."""
    folder = K8S / "overlays" / overlay

    rendered = render(str(folder / "specserve.yaml"))

    assert (folder / "serve-config.yaml").read_text(encoding="utf-8") == rendered, (
        f"render it again: make render K8S=k8s/overlays/{overlay}"
    )


def test_pods_that_checkov_is_given_are_those_of_the_cluster(pools: list[Document]) -> None:
    """`make policy` looks at pods, for checkov knows no RayService."""
    documents = plain_documents(pools)
    pods = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Pod"}

    assert set(pods) == {"head", "draft", "target", "gateway"}
    assert pods["target"]["spec"] == _pod(pools, 1)
    assert len(documents) == len(pools) - 1 + len(pods)
    for spoil in SPOIL_A_POD.values():
        spoilt = copy.deepcopy(pods["target"])
        spoil(spoilt)
        assert spoilt != pods["target"]


def test_volume_and_job_for_models_are_right() -> None:
    assert list(kubernetes_problems(build(K8S / "models"))) == []


# --- sabotage: what each rule is there for


def _service(documents: list[Document]) -> Any:
    (found,) = [d for d in documents if d["kind"] == "RayService"]
    return found


def _cluster(documents: list[Document]) -> Any:
    return _service(documents)["spec"]["rayClusterConfig"]


def _group(documents: list[Document], number: int = 0) -> Any:
    return _cluster(documents)["workerGroupSpecs"][number]


def _pod(documents: list[Document], number: int = 0) -> Any:
    return _group(documents, number)["template"]["spec"]


def _container(documents: list[Document], number: int = 0) -> Any:
    return _pod(documents, number)["containers"][0]


def _head(documents: list[Document]) -> Any:
    return _cluster(documents)["headGroupSpec"]


def _named(documents: list[Document], name: str) -> Any:
    (found,) = [d for d in documents if d["metadata"]["name"] == name and d["kind"] != "RayService"]
    return found


def _drop(documents: list[Document], name: str) -> None:
    documents.remove(_named(documents, name))


def _add_env(documents: list[Document], name: str, value: str = "1") -> None:
    _container(documents)["env"].append({"name": name, "value": value})


def _serve(change: Callable[[Any], object]) -> Callable[[list[Document]], None]:
    """Make a sabotage of the Serve config."""

    def spoil(documents: list[Document]) -> None:
        spec = _service(documents)["spec"]
        config = yaml.safe_load(spec["serveConfigV2"])
        change(config)
        spec["serveConfigV2"] = yaml.safe_dump(config)

    return spoil


def _deployment(config: Any, name: str) -> Any:
    return next(d for d in config["applications"][0]["deployments"] if d["name"] == name)


def _args(config: Any) -> Any:
    return config["applications"][0]["args"]


def _monitor(documents: list[Document], name: str) -> Any:
    return next(d for d in documents if d["kind"] == "PodMonitor" and d["metadata"]["name"] == name)


def _of(documents: list[Document], kind: str, name: str) -> Any:
    (found,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def _mounts(documents: list[Document]) -> Any:
    return _container(documents)["volumeMounts"]


def _mount(documents: list[Document], name: str) -> Any:
    return next(mount for mount in _mounts(documents) if mount["name"] == name)


def _ray_ports(documents: list[Document]) -> Any:
    spec = _named(documents, "specserve-ray")["spec"]
    spec["egress"][0]["ports"] = spec["ingress"][0]["ports"]
    return spec["ingress"][0]["ports"]


def _open_head(documents: list[Document]) -> None:
    """Leave the head selected by no policy that closes its way in."""
    for name in (
        "specserve-closed",
        "specserve-ray",
        "specserve-grpc-in",
        "specserve-clients",
        "specserve-prometheus",
        "specserve-operator",
    ):
        _drop(documents, name)


Spoil = Callable[[list[Document]], object]

SABOTAGE: list[tuple[str, str, Spoil]] = [
    # rule, words of its complaint, what is done to the documents
    ("one_ray_service", "found 2", lambda d: d.append(copy.deepcopy(_service(d)))),
    ("one_ray_service", "DNS-1035", lambda d: _service(d)["metadata"].update(name="4spec")),
    ("one_ray_service", "at most 47", lambda d: _service(d)["metadata"].update(name="a" * 48)),
    (
        "ray_container_first",
        "draft: the first container",
        lambda d: _pod(d)["containers"].insert(0, {"name": "sidecar", "image": "x:1"}),
    ),
    ("ray_container_first", "head: the first", lambda d: _head(d)["template"].update(spec={})),
    ("group_names", "target is there twice", lambda d: _group(d).update(groupName="target")),
    ("resources_stand_once", "head: both", lambda d: _head(d).update(resources={"CPU": "0"})),
    (
        "labels_are_labels",
        "use the group's",
        lambda d: _group(d)["rayStartParams"].update(labels="a=b"),
    ),
    ("labels_are_labels", "is no label", lambda d: _group(d).update(labels={"gpu type": "l4"})),
    (
        "autoscaler_v2",
        "version is not v2",
        lambda d: _cluster(d)["autoscalerOptions"].pop("version"),
    ),
    ("autoscaler_v2", "not true", lambda d: _cluster(d).pop("enableInTreeAutoscaling")),
    ("autoscaler_v2", "restartPolicy Always", lambda d: _pod(d).update(restartPolicy="Always")),
    ("autoscaler_v2", "suspend", lambda d: _group(d).update(suspend=True)),
    (
        "autoscaler_v2",
        "RAY_enable_autoscaler_v2",
        lambda d: _add_env(d, "RAY_enable_autoscaler_v2"),
    ),
    ("replica_bounds", "minReplicas 9", lambda d: _group(d).update(minReplicas=9)),
    (
        "replica_bounds",
        "maxReplicas 0",
        lambda d: _group(d).update(maxReplicas=0, replicas=0, minReplicas=0),
    ),
    ("redis_in_one_place", "env REDIS_PASSWORD", lambda d: _add_env(d, "REDIS_PASSWORD")),
    ("redis_in_one_place", "env RAY_REDIS_ADDRESS", lambda d: _add_env(d, "RAY_REDIS_ADDRESS")),
    (
        "redis_in_one_place",
        "rayStartParams.redis-password",
        lambda d: _head(d)["rayStartParams"].update({"redis-password": "x"}),
    ),
    (
        "redis_in_one_place",
        "annotation ray.io/ft-enabled",
        lambda d: _service(d)["metadata"].update(annotations={"ray.io/ft-enabled": "true"}),
    ),
    ("token_auth", "wanted token", lambda d: _cluster(d).pop("authOptions")),
    ("token_auth", "secretName", lambda d: _cluster(d)["authOptions"].pop("secretName")),
    (
        "token_auth",
        "enableK8s",
        lambda d: _cluster(d)["authOptions"].update(enableK8sTokenAuth=True),
    ),
    ("token_auth", "2.52.0 or newer", lambda d: _cluster(d).update(rayVersion="2.51.1")),
    ("token_auth", "rayVersion None", lambda d: _cluster(d).pop("rayVersion")),
    (
        "upgrade_strategy",
        "wanted one of",
        lambda d: _service(d)["spec"].update(upgradeStrategy={"type": "Rolling"}),
    ),
    (
        "upgrade_strategy",
        "headService",
        lambda d: _head(d).update(headService={"metadata": {"name": "mine"}}),
    ),
    (
        "upgrade_strategy",
        "gatewayClassName",
        lambda d: _service(d)["spec"].update(
            upgradeStrategy={
                "type": "NewClusterWithIncrementalUpgrade",
                "clusterUpgradeOptions": {"stepSizePercent": 10, "intervalSeconds": 30},
            }
        ),
    ),
    (
        "upgrade_strategy",
        "step <= surge",
        lambda d: _service(d)["spec"].update(
            upgradeStrategy={
                "type": "NewClusterWithIncrementalUpgrade",
                "clusterUpgradeOptions": {
                    "stepSizePercent": 50,
                    "maxSurgePercent": 20,
                    "intervalSeconds": 30,
                    "gatewayClassName": "istio",
                },
            }
        ),
    ),
    (
        "no_gated_fields",
        "networkPolicy",
        lambda d: _cluster(d).update(networkPolicy={"mode": "DenyAll"}),
    ),
    ("no_gated_fields", "tlsOptions", lambda d: _cluster(d).update(tlsOptions={"enabled": True})),
    (
        "no_gated_fields",
        "rocksdb",
        lambda d: _cluster(d)["gcsFaultToleranceOptions"].update(backend="rocksdb"),
    ),
    ("tls_left_to_the_operator", "RAY_USE_TLS", lambda d: _add_env(d, "RAY_USE_TLS")),
    (
        "tls_left_to_the_operator",
        "/etc/ray/tls",
        lambda d: _container(d)["volumeMounts"].append(
            {"name": "tmp", "mountPath": "/etc/ray/tls"}
        ),
    ),
    (
        "head_is_found",
        "head: label app.kubernetes.io/name",
        lambda d: _head(d)["template"]["metadata"]["labels"].update(
            {"app.kubernetes.io/name": "specserve"}
        ),
    ),
    (
        "head_is_found",
        "head: label ray.io/identifier",
        lambda d: _head(d).update(labels={"ray.io/identifier": "mine"}),
    ),
    # pods
    ("restricted", "may run as root", lambda d: _pod(d)["securityContext"].pop("runAsNonRoot")),
    ("restricted", "no seccomp", lambda d: _pod(d)["securityContext"].pop("seccompProfile")),
    ("restricted", "hostNetwork", lambda d: _pod(d).update(hostNetwork=True)),
    (
        "restricted",
        "the host's",
        lambda d: _pod(d)["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
    ),
    ("restricted", "token for it", lambda d: _pod(d).pop("automountServiceAccountToken")),
    (
        "restricted",
        "gain privileges",
        lambda d: _container(d)["securityContext"].update(allowPrivilegeEscalation=True),
    ),
    (
        "restricted",
        "root can be written",
        lambda d: _container(d)["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    (
        "restricted",
        "keeps capabilities",
        lambda d: _container(d)["securityContext"].pop("capabilities"),
    ),
    (
        "restricted",
        "autoscaler: ",
        lambda d: _cluster(d)["autoscalerOptions"].pop("securityContext"),
    ),
    (
        "restricted",
        "draft/init: may gain",
        lambda d: _pod(d).update(initContainers=[{"name": "init", "image": "x:1"}]),
    ),
    ("writable_places", "/tmp is no emptyDir", lambda d: _container(d)["volumeMounts"].pop(0)),
    ("writable_places", "no volume shm", lambda d: _pod(d)["volumes"].pop(2)),
    (
        "shared_memory",
        "differ",
        lambda d: _container(d)["resources"]["requests"].update(memory="8Gi"),
    ),
    (
        "shared_memory",
        "object store of 2000000000",
        lambda d: _group(d)["rayStartParams"].update({"object-store-memory": "2000000000"}),
    ),
    ("shared_memory", "object store of inf", lambda d: _group(d)["rayStartParams"].clear()),
    (
        "shared_memory",
        "more than half",
        lambda d: _pod(d)["volumes"][2]["emptyDir"].update(sizeLimit="9Gi"),
    ),
    ("idle_head", "num-cpus", lambda d: _head(d)["rayStartParams"].pop("num-cpus")),
    ("idle_head", "excludeHead", lambda d: _service(d)["spec"].pop("excludeHeadPodFromServeSvc")),
    ("spread", "not spread over", lambda d: _pod(d)["topologySpreadConstraints"].pop()),
    (
        "spread",
        "counts the pods of",
        lambda d: _pod(d)["topologySpreadConstraints"][0].update(labelSelector={}),
    ),
    (
        "spread",
        "other clusters",
        lambda d: _pod(d)["topologySpreadConstraints"][0].pop("matchLabelKeys"),
    ),
    ("images", "wanted one", lambda d: _container(d).update(image="specserve:0.2.0")),
    ("images", "no tag", lambda d: _container(d).update(image="specserve:latest")),
    (
        "secrets_stay_out",
        "Secret s",
        lambda d: d.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}),
    ),
    ("secrets_stay_out", "RAY_AUTH_TOKEN", lambda d: _add_env(d, "RAY_AUTH_TOKEN")),
    (
        "secrets_stay_out",
        "redisPassword",
        lambda d: _cluster(d)["gcsFaultToleranceOptions"].update(redisPassword={"value": "x"}),
    ),
    # ends
    ("gentle_end", "no preStop", lambda d: _container(d).pop("lifecycle")),
    ("gentle_end", "does not hold", lambda d: _pod(d).pop("terminationGracePeriodSeconds")),
    (
        "gentle_end",
        "target: graceful_shutdown_timeout_s 200 of target < drain 100",
        _serve(lambda c: _deployment(c, "target").update(graceful_shutdown_timeout_s=200.0)),
    ),
    (
        "gentle_end",
        "of orchestrator < drain 720 < terminationGracePeriodSeconds 120",
        lambda d: _pod(d, 2).update(terminationGracePeriodSeconds=120),
    ),
    (
        "gentle_end",
        "gateway: graceful_shutdown_timeout_s 633 of gateway < drain 100",
        lambda d: _container(d, 2).update(lifecycle=_container(d)["lifecycle"]),
    ),
    (
        "answers_end_first",
        "old cluster after 60 s",
        lambda d: _service(d)["spec"].update(rayClusterDeletionDelaySeconds=60),
    ),
    (
        "answers_end_first",
        "old cluster after 630 s; requests take 900",
        _serve(lambda c: _args(c)["gateway"].update(request_timeout_s=900)),
    ),
    (
        "answers_end_first",
        "a gateway is ended after 63 s; requests take 600 s",
        _serve(lambda c: _deployment(c, "gateway").update(graceful_shutdown_timeout_s=63.0)),
    ),
    ("budgets", "draft: no Pod", lambda d: _drop(d, "specserve-draft")),
    ("budgets", "target: no Pod", lambda d: _drop(d, "specserve-target")),
    (
        "budgets",
        "minAvailable 3, minReplicas 2",
        lambda d: _named(d, "specserve-draft")["spec"].update(minAvailable=3),
    ),
    (
        "budgets",
        "minAvailable 2 of 2 stops every drain",
        lambda d: _named(d, "specserve-draft")["spec"].update(minAvailable=2),
    ),
    (
        "budgets",
        "minAvailable 1 of 1 stops every drain",
        lambda d: _group(d).update(minReplicas=1),
    ),
    (
        "budgets",
        "whole number",
        lambda d: _named(d, "specserve-draft")["spec"].update(minAvailable="50%"),
    ),
    (
        "budgets",
        "matches none",
        lambda d: _named(d, "specserve-draft")["spec"]["selector"]["matchLabels"].update(app="x"),
    ),
    # Serve
    (
        "serve_schema",
        "max_ongoing_request: unknown to Serve; did you mean 'max_ongoing_requests'",
        _serve(lambda c: _deployment(c, "target").update(max_ongoing_request=5)),
    ),
    (
        "serve_schema",
        "target_ongoing_request: unknown",
        _serve(
            lambda c: _deployment(c, "target")["autoscaling_config"].update(
                target_ongoing_request=5
            )
        ),
    ),
    ("serve_schema", "proxy_locations", _serve(lambda c: c.update(proxy_locations="EveryNode"))),
    ("serve_schema", "hosts: unknown", _serve(lambda c: c["http_options"].update(hosts="x"))),
    (
        "serve_schema",
        "num_gpu: unknown",
        _serve(lambda c: _deployment(c, "draft")["ray_actor_options"].update(num_gpu=1)),
    ),
    (
        "serve_schema",
        "max_replicas (2)",
        _serve(lambda c: _deployment(c, "target")["autoscaling_config"].update(max_replicas=2)),
    ),
    (
        "serve_schema",
        "polici",
        _serve(
            lambda c: _deployment(c, "target")["autoscaling_config"].update(
                policy={"policy_function": "specserve.autoscaling.serve_policy:polici"}
            )
        ),
    ),
    (
        "serve_schema",
        "PoolsPolici is no policy",
        _serve(
            lambda c: c["applications"][0]["autoscaling_policy"].update(
                policy_function="specserve.autoscaling.serve_policy:PoolsPolici"
            )
        ),
    ),
    (
        "serve_schema",
        "autoscaling_policy: KeyError('target_load')",
        _serve(
            lambda c: c["applications"][0]["autoscaling_policy"]["policy_kwargs"]["target"].pop(
                "target_load"
            )
        ),
    ),
    ("serve_schema", "import_path", _serve(lambda c: c["applications"][0].pop("import_path"))),
    ("builder_args", "did you mean 'draft_port'", _serve(lambda c: _args(c).update(draft_prot=1))),
    ("builder_args", "wanted 0.0.0.0", _serve(lambda c: _args(c)["server"].pop("host"))),
    ("builder_args", "target_port is 0", _serve(lambda c: _args(c).update(target_port=0))),
    (
        "builder_args",
        "wanted ['draft'",
        _serve(lambda c: c["applications"][0]["deployments"].pop()),
    ),
    (
        "builder_args",
        "before its drain",
        _serve(lambda c: _deployment(c, "target").update(graceful_shutdown_timeout_s=10.0)),
    ),
    ("ray_of_the_image", "tested with", lambda d: _cluster(d).update(rayVersion="2.59.0")),
    (
        "ports_agree",
        "http_options.port 9000",
        _serve(lambda c: c["http_options"].update(port=9000)),
    ),
    (
        "ports_agree",
        "draft: port serve 8080",
        lambda d: _container(d)["ports"][0].update(containerPort=8080),
    ),
    ("ports_agree", "target: port grpc", _serve(lambda c: _args(c).update(target_port=21201))),
    (
        "ports_agree",
        "draft_metrics_port 9199",
        _serve(lambda c: _args(c).update(draft_metrics_port=9199)),
    ),
    (
        "models_are_mounted",
        "draft: /data",
        _serve(lambda c: _args(c)["speculative"].update(model="/data/draft")),
    ),
    (
        "pools_fit_groups",
        "node group drafts",
        _serve(
            lambda c: _deployment(c, "draft")["ray_actor_options"].update(
                label_selector={"ray.io/node-group": "drafts"}
            )
        ),
    ),
    (
        "pools_fit_groups",
        "node group None",
        _serve(lambda c: _deployment(c, "draft")["ray_actor_options"].pop("label_selector")),
    ),
    (
        "pools_fit_groups",
        "num_gpus 2, a pod of target has 1",
        _serve(lambda c: _deployment(c, "target")["ray_actor_options"].update(num_gpus=2)),
    ),
    (
        "pools_fit_groups",
        "a pod of draft has 0",
        lambda d: _container(d)["resources"]["limits"].pop("nvidia.com/gpu"),
    ),
    ("pools_fit_groups", "maxReplicas 8 hold", lambda d: _group(d, 1).update(maxReplicas=8)),
    (
        "pools_fit_groups",
        "8 replicas on maxReplicas 4",
        lambda d: _group(d, 2).update(maxReplicas=4),
    ),
    (
        "pools_fit_groups",
        "num-gpus is said beside",
        lambda d: _group(d)["rayStartParams"].update({"num-gpus": "2"}),
    ),
    (
        "pools_can_grow",
        "orchestrator: selects ray.io/node-group=gateway, and the labels of gateway have None",
        lambda d: _group(d, 2).pop("labels"),
    ),
    (
        "pools_can_grow",
        "draft: selects ray.io/node-group=draft, and the labels of draft have drafts",
        lambda d: _group(d)["labels"].update({"ray.io/node-group": "drafts"}),
    ),
    (
        "pools_can_grow",
        "target: selects zone=a",
        _serve(
            lambda c: _deployment(c, "target")["ray_actor_options"]["label_selector"].update(
                zone="a"
            )
        ),
    ),
    (
        "ports_agree",
        "a readinessProbe of its own",
        lambda d: _container(d).update(readinessProbe={"httpGet": {"port": 8080}}),
    ),
    (
        "monitored_ports",
        "target: no PodMonitor reads",
        lambda d: _monitor(d, "specserve")["spec"]["podMetricsEndpoints"].pop(1),
    ),
    (
        "monitored_ports",
        "no pod has a port engine",
        lambda d: _monitor(d, "specserve")["spec"]["podMetricsEndpoints"].append(
            {"port": "engine"}
        ),
    ),
    (
        "monitored_ports",
        "unknown field selectors",
        lambda d: _monitor(d, "specserve")["spec"].update(selectors={}),
    ),
    (
        "monitored_ports",
        "selects no pod",
        lambda d: _monitor(d, "specserve")["spec"]["selector"]["matchLabels"].update(app="x"),
    ),
    # secrets
    (
        "mutual_tls",
        "draft: no Secret is mounted at /etc/specserve/tls",
        lambda d: _mounts(d).remove(_mount(d, "grpc-tls")),
    ),
    ("mutual_tls", "no Certificate makes", lambda d: _drop(d, "specserve-grpc")),
    (
        "mutual_tls",
        "is not for specserve.internal",
        lambda d: _named(d, "specserve-grpc")["spec"].update(dnsNames=["other.internal"]),
    ),
    (
        "mutual_tls",
        "is not for mine.internal",
        _serve(lambda c: _args(c)["server"].update(tls_server_name="mine.internal")),
    ),
    ("mutual_tls", "tls_dir is not set", _serve(lambda c: _args(c)["server"].pop("tls_dir"))),
    (
        "certificates",
        "usages ['server auth']",
        lambda d: _named(d, "specserve-grpc")["spec"].update(usages=["server auth"]),
    ),
    (
        "certificates",
        "renewed 0 h before",
        lambda d: _named(d, "specserve-grpc")["spec"].pop("renewBefore"),
    ),
    (
        "certificates",
        "unknown field dnsName",
        lambda d: _named(d, "specserve-grpc")["spec"].update(dnsName="x"),
    ),
    (
        "certificates",
        "wanted cert-manager.io/v1",
        lambda d: _named(d, "specserve-grpc").update(apiVersion="cert-manager.io/v1alpha2"),
    ),
    (
        "certificates",
        "no issuer {",
        lambda d: _named(d, "specserve-grpc")["spec"]["issuerRef"].update(name="company"),
    ),
    (
        "certificates",
        "nothing makes its issuer's Secret",
        lambda d: d.remove(_of(d, "Certificate", "specserve-authority")),
    ),
    (
        "api_keys",
        "no Secret is mounted at /etc/keys",
        _serve(lambda c: _args(c)["gateway"].update(api_key_file="/etc/keys/keys")),
    ),
    (
        "secrets_are_replaced",
        "is never replaced",
        lambda d: _mount(d, "grpc-tls").update(subPath="tls.crt"),
    ),
    ("secrets_are_replaced", "can be written", lambda d: _mount(d, "grpc-tls").pop("readOnly")),
    (
        "secrets_are_replaced",
        "another mode",
        lambda d: _pod(d)["volumes"][-1]["secret"].update(defaultMode=0o644),
    ),
    # network
    (
        "connections",
        "stranger can reach head:8265",
        _open_head,
    ),
    (
        "connections",
        "draft can reach target:21200",
        lambda d: _ray_ports(d).append({"port": 1, "endPort": 65535}),
    ),
    ("connections", "gateway cannot reach draft:21100", lambda d: _drop(d, "specserve-grpc-in")),
    ("connections", "gateway cannot reach target:21200", lambda d: _drop(d, "specserve-grpc-out")),
    ("connections", "draft cannot reach dns:53/UDP", lambda d: _drop(d, "specserve-dns")),
    (
        "connections",
        "draft cannot reach dns of the machine:53/UDP",
        lambda d: _named(d, "specserve-dns")["spec"]["egress"][0]["to"].pop(),
    ),
    ("connections", "cannot reach collector:4317", lambda d: _drop(d, "specserve-otlp")),
    ("connections", "operator cannot reach head:8265", lambda d: _drop(d, "specserve-operator")),
    ("connections", "client cannot reach gateway:8000", lambda d: _drop(d, "specserve-clients")),
    (
        "connections",
        "draft cannot reach hub:443",
        lambda d: _pod(d).update(initContainers=[{"name": "m", "command": ["hf", "pull"]}]),
    ),
    ("connections", "head cannot reach redis:6379", lambda d: _drop(d, "specserve-head-out")),
    (
        "connections",
        "redis-cleanup cannot reach redis:6379",
        lambda d: _drop(d, "specserve-redis-cleanup"),
    ),
    (
        "connections",
        "head cannot reach redis:6380",
        lambda d: _cluster(d)["gcsFaultToleranceOptions"].update(redisAddress="redis:6380"),
    ),
    (
        "connections",
        "stranger can reach gateway:8000",
        lambda d: _named(d, "specserve-clients")["spec"]["ingress"][0].pop("from"),
    ),
    ("inside_only", "LoadBalancer", lambda d: _head(d).update(serviceType="LoadBalancer")),
    (
        "inside_only",
        "Ingress web",
        lambda d: d.append(
            {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "web"}}
        ),
    ),
]


@pytest.mark.parametrize(
    ("rule", "words", "spoil"),
    [pytest.param(*row, id=f"{row[0]}-{number}") for number, row in enumerate(SABOTAGE)],
)
def test_rule_finds_its_fault(
    pools: list[Document], rule: str, words: str, spoil: Callable[[list[Document]], object]
) -> None:
    """The fault, put into the manifests that are right, is named by its own rule.

    Cases from the field: B196 and B199 (idle_head: no replica and no request hangs on the head),
    B200, B202 and B205 (ports_agree: probes and Service follow Serve's port), B203 (inside_only and
    connections: gRPC is inside by policy), B206 (shared_memory), B211 and B212 (pools_fit_groups:
    no demand that no group can meet, GPUs known from the pod's limits), B160 (gentle_end and
    answers_end_first: a drain before the signal, and time for the longest request), B241 and B242
    (connections: the dashboard is the operator's).
    """
    spoilt = copy.deepcopy(pools)
    spoil(spoilt)

    found = [p for p in problems_by_rule(Manifests(spoilt), RULES) if p.startswith(f"{rule}: ")]

    assert any(words in problem for problem in found), found


def test_every_rule_has_a_sabotage() -> None:
    rules = {rule.__name__ for rule in RULES} | {"one_ray_service"}

    assert {rule for rule, _, _ in SABOTAGE} == rules


class TestUpgradeWithoutRoomForTwoClusters:
    """B194: what wants GPUs twice is known, and for that the documents have another way.

    That the old cluster serves on while the new one is pending is what `NewCluster` means.
    """

    def changed(
        self, pools: list[Document], change: Callable[[list[Document]], object]
    ) -> list[Document]:
        changed = copy.deepcopy(pools)
        change(changed)
        assert changed != pools
        return changed

    @pytest.mark.parametrize(
        "change",
        [
            _serve(lambda c: _args(c)["speculative"].update(num_speculative_tokens=3)),
            _serve(lambda c: _deployment(c, "target").update(max_ongoing_requests=7)),
            lambda d: _group(d, 1).update(maxReplicas=40, minReplicas=2),
            lambda d: _pod(d).update(tolerations=[{"key": "gpu", "operator": "Exists"}]),
            lambda d: _cluster(d)["workerGroupSpecs"].append(
                {**copy.deepcopy(_group(d)), "groupName": "draft-2"}
            ),
        ],
        ids=["settings", "serve", "sizes", "tolerations", "another group"],
    )
    def test_settings_and_sizes_need_none(self, pools: list[Document], change: Spoil) -> None:
        assert not needs_second_cluster(_service(pools), _service(self.changed(pools, change)))

    @pytest.mark.parametrize(
        "change",
        [
            lambda d: _container(d).update(image="specserve:0.2.0-cuda"),
            lambda d: _add_env(d, "NEW"),
            lambda d: _cluster(d).update(rayVersion="2.61.0"),
            lambda d: _cluster(d)["workerGroupSpecs"].pop(0),
        ],
        ids=["image", "env", "Ray", "group away"],
    )
    def test_image_and_pods_need_one(self, pools: list[Document], change: Spoil) -> None:
        assert needs_second_cluster(_service(pools), _service(self.changed(pools, change)))

    def test_the_other_way_is_right(self, pools: list[Document], crds: Path) -> None:
        """`type: None` passes every check, and the label of the documents' command is the name."""
        text = (K8S.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")
        assert "`upgradeStrategy.type: None`" in text.replace("\n", " ")
        label = f"ray.io/originated-from-cr-name={_service(pools)['metadata']['name']}"
        assert f"kubectl -n specserve delete raycluster -l {label}" in text

        other = self.changed(
            pools, lambda d: _service(d)["spec"].update(upgradeStrategy={"type": "None"})
        )

        assert _service(pools)["spec"]["upgradeStrategy"]["type"] == "NewCluster"
        assert not needs_second_cluster(_service(pools), _service(other))
        assert list(problems(Manifests(other), crds)) == []


@pytest.mark.parametrize(
    ("words", "spoil"),
    [
        ("selektor", lambda d: _named(d, "specserve-target")["spec"].update(selektor={})),
        ("'80' is not", lambda d: _ray_ports(d).append({"port": 1, "endPort": "80"})),
        ("no kind", lambda d: _named(d, "specserve-dns").update(apiVersion="networking.k8s.io/v2")),
        ("Pod/draft", lambda d: _pod(d).update(tolerationz=[])),
        ("Pod/head", lambda d: _head(d)["template"]["spec"]["containers"][0].update(comand=["x"])),
    ],
)
def test_kubernetes_schemas_find_a_fault_in_every_version(
    pools: list[Document], words: str, spoil: Callable[[list[Document]], object]
) -> None:
    spoilt = copy.deepcopy(pools)
    spoil(spoilt)

    found = [problem for problem in kubernetes_problems(spoilt) if words in problem]

    assert found
    assert all(version in found[0] for version in KUBERNETES_VERSIONS)


@pytest.mark.parametrize(
    ("words", "spoil"),
    [
        ("workerGroups", lambda d: _cluster(d).update(workerGroups=[])),
        ("'2' is not of type 'integer'", lambda d: _group(d).update(minReplicas="2")),
        ("'groupName' is a required", lambda d: _group(d).pop("groupName")),
        ("rayVersoin", lambda d: _cluster(d).update(rayVersoin="2.60.0")),
        ("is not one of", lambda d: _cluster(d)["authOptions"].update(mode="password")),
        ("'0' is not of type", lambda d: _pod(d).update(terminationGracePeriodSeconds="0")),
        ("comand", lambda d: _container(d).update(comand=["x"])),
        ("wanted ray.io/v1", lambda d: _service(d).update(apiVersion="ray.io/v1alpha1")),
        (
            "is there twice",
            lambda d: _pod(d)["topologySpreadConstraints"].append(
                _pod(d)["topologySpreadConstraints"][0]
            ),
        ),
        ("0 is not of type 'string'", lambda d: _head(d)["rayStartParams"].update({"num-cpus": 0})),
    ],
)
def test_kuberays_schema_finds_a_fault(
    pools: list[Document], crds: Path, words: str, spoil: Callable[[list[Document]], object]
) -> None:
    spoilt = copy.deepcopy(pools)
    spoil(spoilt)

    found = list(ray_service_problems(spoilt, crds))

    assert any(words in problem for problem in found), found


SPOILT_FILES = [
    # file, what is found there, what it becomes, the overlay that uses it, words of the complaint
    ("base/rayservice.yaml", "groupName: draft", "groupName: drafts", "gpu-small", "test failed"),
    ("base/kustomization.yaml", "- namespace.yaml", "- namespaces.yaml", "gpu-small", "kustomize"),
    ("base/namespace.yaml", "kind: Namespace", "kind: Namespaze", "gpu-small", "Namespaze"),
    ("base/network-policies.yaml", "policyTypes", "policyType", "gpu-small", "policyType"),
    ("base/pod-disruption-budgets.yaml", "minAvail", "minAvai", "gpu-small", "minAvaiable"),
    ("components/api-keys/kustomization.yaml", "mount.yaml", "mounts.yaml", "gpu-pools", "kustom"),
    ("components/api-keys/mount.yaml", "/etc/specserve/keys", "/etc/keys", "gpu-pools", "api_keys"),
    ("components/mtls/authority.yaml", "isCA: true", "isCA: false", "gpu-pools", "certificates"),
    ("components/mtls/certificate.yaml", "dnsNames", "dnsName", "gpu-pools", "dnsName"),
    ("components/mtls/kustomization.yaml", "- authority.yaml", "", "gpu-pools", "certificates"),
    ("components/mtls/mount.yaml", "readOnly: true", "readOnly: 1", "gpu-pools", "readOnly"),
    (
        *("components/observability/kustomization.yaml", "- network-policies.yaml", ""),
        *("gpu-small", "connections"),
    ),
    ("components/observability/network-policies.yaml", "4317", "4318", "gpu-small", "4317"),
    ("components/observability/pod-monitor.yaml", "engine-me", "me", "gpu-small", "monitored"),
    ("components/observability/trace.yaml", "value: draft", "value: x", "gpu-small", "test failed"),
    ("overlays/cpu-embedded/groups.yaml", "op: remove", "op: move", "cpu-embedded", "kustomize"),
    ("overlays/cpu-embedded/kustomization.yaml", "- pull.yaml", "", "cpu-embedded", "hub:443"),
    ("overlays/cpu-embedded/pull.yaml", "port: 443", "port: 80", "cpu-embedded", "hub:443"),
    ("overlays/cpu-embedded/serve-config.yaml", "\n  args", "\n  arg", "cpu-embedded", "arg"),
    (
        *("overlays/gpu-pools/groups.yaml", "minReplicas, value: 4", "minReplicas, value: 44"),
        *("gpu-pools", "minReplicas 44"),
    ),
    (
        *("overlays/gpu-pools/kustomization.yaml", "- ../../components/mtls", ""),
        *("gpu-pools", "mutual_tls"),
    ),
    ("overlays/gpu-pools/draft-budget.yaml", "minAvail", "minAvai", "gpu-pools", "minAvaiable"),
    ("overlays/gpu-pools/serve-config.yaml", "num_gpus: 1", "num_gpus: 2", "gpu-pools", "a pod of"),
    ("overlays/gpu-small/groups.yaml", "Specs/1/", "Specs/7/", "gpu-small", "kustomize"),
    ("overlays/gpu-small/kustomization.yaml", "- ../../base", "- ../base", "gpu-small", "kustom"),
    ("overlays/gpu-small/serve-config.yaml", "num_gpus: 1", "num_gpus: 2", "gpu-small", "a pod of"),
]


def test_every_file_has_a_spoilt_copy() -> None:
    """But for settings, which the rendered file is compared with, alert rules, which promtool and
    the other copy check, and the folder of models, which is no cluster."""
    elsewhere = {"specserve.yaml", "rules.yaml"}
    files = {
        str(path.relative_to(K8S)) for path in K8S.rglob("*.yaml") if path.name not in elsewhere
    }

    assert {file for file, *_ in SPOILT_FILES} == {f for f in files if not f.startswith("models/")}


@pytest.mark.parametrize(
    ("file", "old", "new", "overlay", "words"),
    [pytest.param(*row, id=row[0]) for row in SPOILT_FILES],
)
def test_make_validate_finds_a_fault_in_a_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    old: str,
    new: str,
    overlay: str,
    words: str,
) -> None:
    """The command itself: exit code 1 and the complaint for a spoilt copy."""
    copied = tmp_path / "k8s"
    shutil.copytree(K8S, copied)
    text = (copied / file).read_text(encoding="utf-8")
    assert old in text
    (copied / file).write_text(text.replace(old, new), encoding="utf-8")

    assert main([str(copied / "overlays" / overlay)]) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kustomization.yaml", "- volume.yaml", "- volumes.yaml"),
        ("pull.yaml", "backoffLimit", "backofLimit"),
        ("volume.yaml", "accessModes", "accessMode"),
    ],
)
def test_a_fault_in_the_folder_of_models_is_found(
    tmp_path: Path, file: str, old: str, new: str
) -> None:
    shutil.copytree(K8S / "models", tmp_path / "models")
    path = tmp_path / "models" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")

    try:
        found = list(kubernetes_problems(build(tmp_path / "models")))
    except BuildFailure as error:
        found = [str(error)]

    assert found


def test_folder_that_is_none_is_refused() -> None:
    assert main(["no/such/folder"]) == 2


def test_kustomizations_complaint_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]")

    with pytest.raises(BuildFailure, match="missing.yaml"):
        build(tmp_path)


def test_policies_are_evaluated_as_a_cluster_does() -> None:
    """No policy: open. One that selects: closed but for its rules, on both ends."""
    ours, theirs = Place({"app": "a"}, is_ours=True), Place({"app": "b"}, {"name": "other"})
    closed = {"spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}
    opened = {
        "spec": {
            "podSelector": {"matchLabels": {"app": "a"}},
            "ingress": [
                {
                    "from": [{"namespaceSelector": {"matchLabels": {"name": "other"}}}],
                    "ports": [{"port": 80, "endPort": 90}],
                }
            ],
        }
    }

    assert allows([], theirs, ours, 80)
    assert not allows([closed], theirs, ours, 80)
    assert not allows([closed], ours, theirs, 80)
    assert allows([closed, opened], theirs, ours, 90)
    assert not allows([closed, opened], theirs, ours, 91)
    assert not allows([closed, opened], theirs, ours, 80, "UDP")
    assert not allows([closed, opened], Place({}, is_ours=True), ours, 80)


def test_addresses_are_evaluated_where_they_are_known() -> None:
    """A block opens its addresses but those it leaves out, and no pod, whose address is unknown."""
    block = {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}
    policy = {
        "spec": {
            "podSelector": {},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"ipBlock": block}]}],
        }
    }
    ours = Place({"app": "a"}, is_ours=True)

    assert allows([policy], ours, Place({}, address="10.2.0.1"), 80)
    assert not allows([policy], ours, Place({}, address="10.1.0.1"), 80)
    assert not allows([policy], ours, Place({}, address="169.254.20.10"), 80)
    assert not allows([policy], ours, Place({"app": "b"}), 80)


@pytest.mark.parametrize(("text", "value"), [("500m", 0.5), ("16Gi", 16 * 2**30), ("2", 2), (1, 1)])
def test_quantities_are_read(text: str, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize(
    "path", ["k8s/overlays/cpu-embedded/specserve.yaml", "deploy/compose/specserve.yaml"]
)
def test_the_embedded_pair_speculates_wherever_as_serve_has_it(path: str) -> None:
    """What was measured for it holds for everyone who is given it."""
    settings = yaml.safe_load((K8S.parent / path).read_text(encoding="utf-8"))
    assert settings["speculative"] == {"model": "/models/draft", **EMBEDDED_DEFAULTS}
