"""NetworkPolicies, evaluated: who may open a connection to whom.

What a network plugin that honours them does: a pod that no policy selects is open; for one that
some policy selects, a connection needs a rule that allows it, on the way out and on the way in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

from support.manifests.documents import Document, Manifests, containers
from support.manifests.operator_rules import Rule


@dataclass(frozen=True, slots=True)
class Place:
    """A pod, or another end of a connection, as policies see it."""

    pod: Mapping[str, str]
    """Its labels."""
    namespace: Mapping[str, str] = field(default_factory=dict)
    """Labels of its namespace, the name among them."""
    is_ours: bool = False
    """In the namespace of the policies."""
    address: str = ""
    """Where it is known: that of a process on a machine, which has no labels."""


def allows(
    policies: list[Document], source: Place, target: Place, port: int, protocol: str = "TCP"
) -> bool:
    """Tell whether `source` may open a connection to `target`."""
    return _passes(policies, "Egress", source, target, port, protocol) and _passes(
        policies, "Ingress", target, source, port, protocol
    )


def _passes(
    policies: list[Document], way: str, pod: Place, peer: Place, port: int, protocol: str
) -> bool:
    if not pod.is_ours:
        return True  # policies of its own namespace are not known here
    selecting = [
        policy["spec"]
        for policy in policies
        if way in policy["spec"].get("policyTypes", ["Ingress"])
        and _matches(policy["spec"]["podSelector"], pod.pod)
    ]
    if not selecting:
        return True
    rules = [rule for spec in selecting for rule in spec.get(way.lower()) or []]
    peers = "from" if way == "Ingress" else "to"
    return any(
        _peer_matches(rule.get(peers), peer) and _port_matches(rule.get("ports"), port, protocol)
        for rule in rules
    )


def _peer_matches(peers: list[Document] | None, peer: Place) -> bool:
    if not peers:
        return True
    for wanted in peers:
        if "ipBlock" in wanted:
            if peer.address and _in_block(wanted["ipBlock"], peer.address):
                return True
            continue
        namespaces = wanted.get("namespaceSelector")
        in_namespace = peer.is_ours if namespaces is None else _matches(namespaces, peer.namespace)
        if in_namespace and _matches(wanted.get("podSelector") or {}, peer.pod):
            return True
    return False


def _in_block(block: Document, address: str) -> bool:
    found = ip_address(address)
    left_out = any(found in ip_network(part) for part in block.get("except") or [])
    return found in ip_network(block["cidr"]) and not left_out


def _port_matches(ports: list[Document] | None, port: int, protocol: str) -> bool:
    if not ports:
        return True
    for wanted in ports:
        first: int = wanted["port"]
        last: int = wanted.get("endPort", first)
        if wanted.get("protocol", "TCP") == protocol and first <= port <= last:
            return True
    return False


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if "matchExpressions" in selector:
        raise ValueError("matchExpressions are not evaluated")
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    return wanted.items() <= dict(labels).items()


@dataclass(frozen=True, slots=True)
class Want:
    """One connection, and whether there must be one."""

    source: str
    target: str
    port: int
    allowed: bool
    protocol: str = "TCP"


def wanted_connections(manifests: Manifests) -> list[Want]:
    """List what must be open, and what must not."""
    args = manifests.serve_args
    draft, target = args.get("draft_port", 0), args["target_port"]
    orchestrator = args["orchestrator_port"]
    redis = _redis_port(manifests)
    wants = [
        # the data plane
        Want("gateway", "draft", draft, allowed=True),
        Want("gateway", "target", target, allowed=True),
        Want("gateway", "gateway", orchestrator, allowed=True),
        Want("draft", "target", target, allowed=False),
        Want("target", "draft", draft, allowed=False),
        Want("draft", "gateway", orchestrator, allowed=False),
        Want("head", "target", target, allowed=False),
        Want("client", "target", target, allowed=False),
        Want("client", "draft", draft, allowed=False),
        Want("client", "gateway", orchestrator, allowed=False),
        Want("stranger", "target", target, allowed=False),
        # requests, and Serve's proxies passing them on
        Want("client", "gateway", 8000, allowed=True),
        Want("stranger", "gateway", 8000, allowed=False),
        Want("draft", "gateway", 10500, allowed=True),
        # Ray
        Want("target", "head", 6379, allowed=True),
        Want("head", "draft", 52365, allowed=True),
        Want("stranger", "head", 6379, allowed=False),
        Want("client", "head", 10001, allowed=False),
        # the dashboard runs what it is sent
        Want("operator", "head", 8265, allowed=True),
        Want("client", "head", 8265, allowed=False),
        Want("stranger", "head", 8265, allowed=False),
        Want("prometheus", "head", 8265, allowed=False),
        # what pods need from outside
        Want("draft", "dns", 53, allowed=True, protocol="UDP"),
        Want("gateway", "dns", 53, allowed=True, protocol="TCP"),
        Want("draft", "dns of the machine", 53, allowed=True, protocol="UDP"),
        Want("gateway", "dns of the machine", 53, allowed=True, protocol="TCP"),
        Want("head", "redis", redis, allowed=True),
        Want("redis-cleanup", "redis", redis, allowed=True),
        Want("redis-cleanup", "hub", 443, allowed=False),
        Want("target", "redis", redis, allowed=False),
        Want("target", "stranger", 80, allowed=False),
    ]
    for group in manifests.workers:
        # Only pods that fetch models at start need the world, and only they have it.
        pulls = any("pull" in c.get("command", []) for c in containers(group))
        wants.append(Want(group.name, "hub", 443, allowed=pulls))
    if any("OTEL_EXPORTER_OTLP_ENDPOINT" in group.env() for group in manifests.groups):
        wants += [Want(g.name, "collector", 4317, allowed=True) for g in manifests.workers]
    if manifests.of_kind("PodMonitor"):
        wants.append(Want("prometheus", "draft", 8080, allowed=True))
        roles = (("draft", "draft"), ("target", "target"), ("gateway", "orchestrator"))
        for name, role in roles:
            port = args.get(f"{role}_metrics_port", 0)
            wants.append(Want("prometheus", name, port, allowed=True))
    return wants


def _redis_port(manifests: Manifests) -> int:
    options = manifests.cluster.get("gcsFaultToleranceOptions") or {}
    return int(str(options.get("redisAddress", "redis:6379")).rpartition(":")[2])


def connections(manifests: Manifests) -> Iterator[str]:
    """Exactly the connections that are needed are open."""
    policies = manifests.of_kind("NetworkPolicy")
    places = {group.name: Place(group.labels, is_ours=True) for group in manifests.groups}
    # The operator's job after a cluster's end: a head's pod, but for this label.
    cleanup = {**places["head"].pod, "ray.io/node-type": "redis-cleanup"}
    places |= {
        "redis-cleanup": Place(cleanup, is_ours=True),
        "client": Place({}, {"specserve/client": "true"}),
        "stranger": Place({}, {"kubernetes.io/metadata.name": "default"}),
        "operator": Place(
            {"app.kubernetes.io/name": "kuberay-operator"},
            {"kubernetes.io/metadata.name": "kuberay-system"},
        ),
        "prometheus": Place({}, {"kubernetes.io/metadata.name": "monitoring"}),
        "collector": Place({}, {"kubernetes.io/metadata.name": "observability"}),
        "dns": Place({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"}),
        # NodeLocal DNSCache: a process of the machine, at an address that is the same on each.
        "dns of the machine": Place({}, address="169.254.20.10"),
        "hub": Place({}, {"kubernetes.io/metadata.name": "somewhere"}),
        "redis": Place({}, {"kubernetes.io/metadata.name": "redis"}),
    }
    for want in wanted_connections(manifests):
        source, target = places[want.source], places[want.target]
        if allows(policies, source, target, want.port, want.protocol) != want.allowed:
            verb = "cannot" if want.allowed else "can"
            yield f"{want.source} {verb} reach {want.target}:{want.port}/{want.protocol}"


def inside_only(manifests: Manifests) -> Iterator[str]:
    """Nothing of ours is opened to the world: no Ingress, no node port, no load balancer."""
    yield from (
        f"{kind} {d['metadata']['name']}"
        for kind in ("Ingress", "HTTPRoute")
        for d in manifests.of_kind(kind)
    )
    kinds = [d["spec"].get("type", "ClusterIP") for d in manifests.of_kind("Service")]
    kinds.append(manifests.cluster["headGroupSpec"].get("serviceType", "ClusterIP"))
    yield from (f"a Service of type {kind}" for kind in kinds if kind != "ClusterIP")


NETWORK_RULES: tuple[Rule, ...] = (connections, inside_only)
