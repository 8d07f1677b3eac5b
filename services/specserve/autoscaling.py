"""How many replicas of a draft, target or orchestrator pool their load asks for.

Serve's own policy counts requests that pass through its handles, and our sessions never do: left
to it, a pool would stay at its minimum whatever its load. Named by `serve_config.py`, called by
Serve's controller, which adds delays and bounds. Knows no Ray beyond the attributes that it reads.
"""

from collections.abc import Mapping
from typing import Any, Protocol

LOAD_POLICY = "specserve.autoscaling:load_policy"
"""Import path for Serve's `policy_function`."""

LOAD_STATISTICS = ("num_sessions", "num_running", "num_waiting")
"""What of a replica's `record_autoscaling_stats` is load: an engine has sessions, of which the
waiting are a part; an orchestrator has requests, running or waiting."""


class Target(Protocol):
    """What the policy reads of Serve's autoscaling settings."""

    target_ongoing_requests: float


class LoadContext(Protocol):
    """What the policy reads of Serve's `AutoscalingContext`."""

    config: Target
    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """{statistic: {replica: its mean over the look-back period}}."""
        ...


def load_policy(ctx: LoadContext) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas that brings each to `target_ongoing_requests`, and no state.

    Without any report yet, as after the controller has been restarted, the number stays.
    """
    statistics = ctx.aggregated_metrics or {}
    if "num_sessions" in statistics:
        loads = [statistics["num_sessions"]]
    else:
        loads = [statistics[name] for name in LOAD_STATISTICS if name in statistics]
    if not any(loads):
        return float(ctx.target_num_replicas), {}
    total = sum(sum(of_replica.values()) for of_replica in loads)
    return total / ctx.config.target_ongoing_requests, {}
