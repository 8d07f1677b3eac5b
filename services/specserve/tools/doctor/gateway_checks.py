"""What a gateway's own words say of its pair: readiness, replicas, failures. Pure."""

from __future__ import annotations

from specserve.gateway.errors import status_of
from specserve.telemetry import CANCELLED
from specserve.tools.doctor.gateway_facts import GatewayFacts
from specserve.tools.doctor.status import Check, Status

KV_NEARLY_FULL = 0.95


def check_gateway(facts: GatewayFacts) -> list[Check]:
    """Look at the gateway, and at how requests failed."""
    ready = facts.ready
    if not ready.get("ready"):
        return [Check("gateway", Status.PROBLEM, f"not ready: {ready.get('reason')}")]
    found = f"target {ready.get('target')}, draft {ready.get('draft')}"
    if ready.get("speculation_enabled"):
        found += f", K = {ready.get('num_speculative_tokens')}"
    else:
        found += f", speculation off{': ' + ready['reason'] if ready.get('reason') else ''}"
    checks = [Check("gateway", Status.OK, found)]
    if not ready.get("lossless", True):
        text = "acceptance is synthetic, for benchmarks: the text means nothing"
        checks.append(Check("lossless", Status.PROBLEM, text))
    said = ", ".join(
        f"{name} {count}"
        for name, count in sorted(facts.failures.items())
        if name != CANCELLED and status_of(name) >= 500
    )
    if said:
        checks.append(Check("failures", Status.NOTE, f"since the gateway's start: {said}"))
    return checks


def check_pool(facts: GatewayFacts) -> list[Check]:
    """Look at replicas and at the switch."""
    pool = facts.pool
    if pool is None:
        return [Check("pool", Status.NOTE, "the console is off, and with it the pool's view")]
    checks = []
    for role in ("target", "draft"):
        members = [one for one in pool.replicas if one.role == role]
        connected = [one for one in members if one.state == "connected"]
        if not members:
            continue  # a method without a draft model has none
        fullest = max((one.kv_cache_usage for one in connected), default=0.0)
        waiting = sum(one.num_waiting for one in connected)
        found = (
            f"{len(connected)} of {len(members)} connected, {waiting} calls wait, "
            f"KV in use at most {fullest:.0%}"
        )
        status = Status.OK if len(connected) == len(members) else Status.NOTE
        if fullest > KV_NEARLY_FULL:
            status = Status.NOTE
        if not connected:
            status, found = Status.PROBLEM, f"none of {len(members)} connected"
        checks.append(Check(f"{role}s", status, found))
    if modes := {one.speculation_mode for one in pool.orchestrators} - {"on", "auto"}:
        checks.append(Check("switch", Status.NOTE, f"speculation is {', '.join(sorted(modes))}"))
    return checks
