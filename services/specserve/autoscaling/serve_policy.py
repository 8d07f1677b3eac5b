"""The policies that Ray Serve's controller calls: one for all pools, and a simple one for a pool.

Serve's own policy counts requests that pass through its handles, and our sessions never do: left
to it, a pool would stay at its minimum whatever its load. `PoolsPolicy` is an application's, named
in a rendered configuration; `load_policy` a deployment's, for an application that is run without
one. Knows no Ray beyond the attributes that it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import Any, Protocol, TypeVar

from specserve.autoscaling.demand import Aims
from specserve.autoscaling.pools import Decision, PoolPlan, PoolState, PoolView, decide
from specserve.autoscaling.settling import Bounds

POOLS_POLICY = "specserve.autoscaling.serve_policy:PoolsPolicy"
LOAD_POLICY = "specserve.autoscaling.serve_policy:load_policy"
"""Import paths for Serve's `policy_function`."""

logger = logging.getLogger("ray.serve")

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


class PoolContext(Protocol):
    """What the application's policy reads of Serve's `AutoscalingContext`."""

    deployment_name: str
    target_num_replicas: int
    current_time: float | None

    @property
    def total_num_requests(self) -> float:
        """Requests that pass through Serve."""
        ...

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """{statistic: {replica: its mean over the look-back period}}."""
        ...


DeploymentT = TypeVar("DeploymentT", bound=Hashable)


class PoolsPolicy:
    """Scales all pools of an application. Serve makes one, and calls it a few times a second."""

    def __init__(self, **pools: Mapping[str, float]) -> None:
        """Take what is configured.

        Args:
            pools: by role, the fields of `Aims` and `Bounds`; each pool that is to be scaled.
        """
        self._plans = {role: _plan(fields) for role, fields in pools.items()}
        self._states: dict[str, PoolState] = {}

    def __call__(
        self, contexts: Mapping[DeploymentT, PoolContext]
    ) -> tuple[dict[DeploymentT, int], dict[DeploymentT, dict[str, Any]]]:
        """Return the replicas that each deployment shall have, and no state of Serve's keeping."""
        views = {context.deployment_name: _view(context) for context in contexts.values()}
        now = max((context.current_time or 0.0 for context in contexts.values()), default=0.0)
        decisions, self._states = decide(self._plans, views, self._states, now)
        for role, decision in decisions.items():
            _log(role, views[role].num_wanted, decision)
        return {
            deployment: decisions[context.deployment_name].num_replicas
            for deployment, context in contexts.items()
            if context.deployment_name in decisions
        }, {}


def _plan(fields: Mapping[str, float]) -> PoolPlan:
    aims = Aims(fields["target_load"], fields["target_kv_usage"], fields["target_queue_s"])
    low, high = int(fields["min_replicas"]), int(fields["max_replicas"])
    bounds = Bounds(low, high, fields["upscale_delay_s"], fields["downscale_delay_s"])
    return PoolPlan(aims, bounds)


def _view(context: PoolContext) -> PoolView:
    reports: dict[Any, dict[str, float]] = {}
    for name, values in (context.aggregated_metrics or {}).items():
        for replica, value in values.items():
            reports.setdefault(replica, {})[name] = value
    return PoolView(
        context.target_num_replicas, tuple(reports.values()), float(context.total_num_requests)
    )


def _log(role: str, before: int, decision: Decision) -> None:
    if decision.num_replicas != before:
        logger.info(
            "pool %s: %d -> %d replicas: %s", role, before, decision.num_replicas, decision.reason
        )
