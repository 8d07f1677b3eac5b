"""What the Serve config must say to be taken, and to fit the pods around it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from ray import __version__ as ray_version
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from specserve.config_parsing import build, did_you_mean
from specserve.errors import ConfigurationError
from specserve.serve_args import ServeArgs, check_serve_args
from support.manifests.documents import Document, Manifests
from support.manifests.operator_rules import Rule


def serve_schema(manifests: Manifests) -> Iterator[str]:
    """Serve takes the config, and ignores no key of it."""
    config = manifests.serve_config
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        yield from (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return
    yield from _unknown(config, ServeDeploySchema, "")
    yield from _unknown(config.get("http_options") or {}, HTTPOptionsSchema, "http_options.")
    yield from _unknown(config.get("logging_config") or {}, LoggingConfig, "logging_config.")
    for application in config["applications"]:
        yield from _unknown(application, ServeApplicationSchema, "applications.")
        yield from _policy(application.get("autoscaling_policy"))
        for deployment in application.get("deployments") or []:
            yield from _deployment(deployment)


def _policy(policy: Document | None) -> Iterator[str]:
    """Make the application's policy as Serve's controller will."""
    if policy is None:
        return
    yield from _unknown(policy, AutoscalingPolicy, "autoscaling_policy.")
    module, _, name = policy["policy_function"].partition(":")
    made = getattr(importlib.import_module(module), name, None)
    try:
        if not isinstance(made, type) or not callable(made(**policy.get("policy_kwargs") or {})):
            yield f"autoscaling_policy: {policy['policy_function']} is no policy"
    except (KeyError, TypeError, ValueError) as error:
        yield f"autoscaling_policy: {error!r}"


def _deployment(deployment: Document) -> Iterator[str]:
    where = f"{deployment['name']}."
    yield from _unknown(deployment, DeploymentSchema, where)
    actor = deployment.get("ray_actor_options") or {}
    yield from _unknown(actor, RayActorOptionsSchema, f"{where}ray_actor_options.")
    yield from _unknown(deployment.get("logging_config") or {}, LoggingConfig, f"{where}logging.")
    scaling = deployment.get("autoscaling_config")
    if scaling is None:
        return
    yield from _unknown(scaling, AutoscalingConfig, f"{where}autoscaling_config.")
    try:
        AutoscalingConfig(**scaling)
    except (ValidationError, ImportError, AttributeError, ValueError) as error:
        yield f"{where}autoscaling_config: {error}"
        return
    path = (scaling.get("policy") or {}).get("policy_function")
    if path is not None:
        module, _, name = path.partition(":")
        if not callable(getattr(importlib.import_module(module), name, None)):
            yield f"{where}autoscaling_config: {path} is no policy"


def _unknown(given: Mapping[str, Any], model: type[BaseModel], where: str) -> Iterator[str]:
    known = set(model.model_fields)
    if model is ServeApplicationSchema:
        known.add("args")
    for key in given:
        if key not in known:
            yield f"{where}{key}: unknown to Serve{did_you_mean(key, known)}"


def builder_args(manifests: Manifests) -> Iterator[str]:
    """The builder takes its arguments, and they suit a cluster of several machines."""
    try:
        args = build(ServeArgs, manifests.serve_args, "args")
        check_serve_args(args, "args")
    except ConfigurationError as error:
        yield str(error)
        return
    if args.server.host != "0.0.0.0":
        yield f"server.host {args.server.host}: no other pod reaches it; wanted 0.0.0.0"
    wanted = set(args.roles)
    if wanted != set(manifests.deployments):
        yield f"deployments {sorted(manifests.deployments)}, wanted {sorted(wanted)}"
    for role in ("draft", "target", "orchestrator"):
        if role in wanted and not getattr(args, f"{role}_port"):
            yield f"{role}_port is 0: no NetworkPolicy can name it"
    longest_s = max(args.server.drain_deadline_s, args.gateway.shutdown_grace_s)
    for name, deployment in manifests.deployments.items():
        live_s = longest_s if name == "gateway" else args.server.drain_deadline_s
        if deployment["graceful_shutdown_timeout_s"] <= live_s:
            yield f"{name}: Serve ends a replica before its drain of {live_s:g} s is over"


def ray_of_the_image(manifests: Manifests) -> Iterator[str]:
    """rayVersion is that of the Ray that the image is built with, hence the one tested."""
    if manifests.cluster.get("rayVersion") != ray_version:
        yield f"rayVersion {manifests.cluster.get('rayVersion')}, tested with {ray_version}"


def ports_agree(manifests: Manifests) -> Iterator[str]:
    """Serve's HTTP port is the `serve` port of every pod: its Service and its probes follow it."""
    port = manifests.serve_config["http_options"]["port"]
    args = manifests.serve_args
    for group in manifests.groups:
        ports = {p["name"]: p["containerPort"] for p in group.ray_container.get("ports") or []}
        if ports.get("serve") != port:
            yield f"{group.name}: port serve {ports.get('serve')}, http_options.port {port}"
        for probe in ("readinessProbe", "livenessProbe"):
            if probe in group.ray_container:
                yield f"{group.name}: a {probe} of its own, where the operator's follows the ports"
        if group.is_head:
            continue
        role = "orchestrator" if group.name == "gateway" else group.name
        for name, key in (("grpc", f"{role}_port"), ("engine-metrics", f"{role}_metrics_port")):
            if ports.get(name) != args.get(key):
                yield f"{group.name}: port {name} {ports.get(name)}, {key} {args.get(key)}"


def models_are_mounted(manifests: Manifests) -> Iterator[str]:
    """Every worker that loads a model finds its path under a mount."""
    paths = {"target": manifests.serve_args["target"]["model"]}
    paths["gateway"] = paths["target"]
    speculative = manifests.serve_args.get("speculative") or {}
    if speculative.get("model"):
        paths["draft"] = speculative["model"]
    for group in manifests.workers:
        path = paths.get(group.name)
        mounts = [m["mountPath"] for m in group.ray_container.get("volumeMounts") or []]
        if path is not None and not any(path.startswith(f"{mount}/") for mount in mounts):
            yield f"{group.name}: {path} is under no mount"


def monitored_ports(manifests: Manifests) -> Iterator[str]:
    """A PodMonitor names ports that the pods it selects have, in fields that PodMonitor has."""
    for monitor in manifests.of_kind("PodMonitor"):
        name, spec = monitor["metadata"]["name"], monitor["spec"]
        known = {"selector", "podTargetLabels", "podMetricsEndpoints", "namespaceSelector"}
        yield from (f"{name}: unknown field {key}" for key in set(spec) - known)
        wanted = spec["selector"]["matchLabels"].items()
        pods = [group for group in manifests.groups if wanted <= group.labels.items()]
        if not pods:
            yield f"{name}: selects no pod"
        for endpoint in spec["podMetricsEndpoints"]:
            fields = set(endpoint) - {"port", "path", "interval", "scrapeTimeout"}
            yield from (f"{name}: unknown field {key}" for key in fields)
            if not re.fullmatch(r"\d+(s|m)", endpoint.get("interval", "30s")):
                yield f"{name}: interval {endpoint['interval']}"
            ports = {p["name"] for g in pods for p in g.ray_container.get("ports") or []}
            if endpoint.get("port") not in ports:
                yield f"{name}: no pod has a port {endpoint.get('port')}"
    yield from _unwatched(manifests)


def _unwatched(manifests: Manifests) -> Iterator[str]:
    """Where pods are watched at all, every group's metrics of ours are."""
    watched = [
        (spec["selector"]["matchLabels"].items(), {one.get("port") for one in endpoints})
        for spec in (monitor["spec"] for monitor in manifests.of_kind("PodMonitor"))
        for endpoints in [spec["podMetricsEndpoints"]]
        if spec["selector"].get("matchLabels")
    ]
    for group in manifests.workers if watched else []:
        for port in group.ray_container.get("ports") or []:
            seen = any(
                labels <= group.labels.items() and port["name"] in ports
                for labels, ports in watched
            )
            if port["name"] == "engine-metrics" and not seen:
                yield f"{group.name}: no PodMonitor reads its port engine-metrics"


SERVE_RULES: tuple[Rule, ...] = (
    serve_schema,
    builder_args,
    ray_of_the_image,
    ports_agree,
    models_are_mounted,
    monitored_ports,
)
