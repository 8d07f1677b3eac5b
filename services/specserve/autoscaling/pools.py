"""All pools of an application, scaled by one look at all of them.

Joins what loads ask for (`demand.py`) and what comes of it (`settling.py`). Knows roles and
reports; knows no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specserve.autoscaling.demand import (
    Aims,
    PoolLoad,
    Wanted,
    learned_limit,
    wanted_drafts,
    wanted_targets,
)
from specserve.autoscaling.probing import Probing, probe
from specserve.autoscaling.settling import Bounds, Settled, settle

Report = Mapping[str, float]
"""What one replica says of itself: `record_autoscaling_stats`, by name."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How one pool is scaled."""

    aims: Aims
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class PoolState:
    """What is remembered of one pool."""

    limit: float
    """Sessions that a replica is taken to carry."""
    at: float
    """When it was last looked at."""
    settled: Settled = field(default_factory=Settled)
    probing: Probing = field(default_factory=Probing)


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool at one moment."""

    num_wanted: int
    """Replicas that were asked for last."""
    reports: tuple[Report, ...] = ()
    """Of its running replicas; those that have just started may be missing."""
    num_requests: float = 0.0
    """Requests that pass through Serve (gateways)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one pool."""

    num_replicas: int
    reason: str


def decide(
    plans: Mapping[str, PoolPlan],
    views: Mapping[str, PoolView],
    states: Mapping[str, PoolState],
    now: float,
) -> tuple[dict[str, Decision], dict[str, PoolState]]:
    """Decide on every pool that has a plan and a view.

    A pool whose load nobody has reported keeps its replicas.

    Returns:
        Decisions, and what to hand in as `states` the next time; both by role.
    """
    decisions: dict[str, Decision] = {}
    after = dict(states)
    orchestrators = views["orchestrator"].reports if "orchestrator" in views else ()
    for role, plan in plans.items():
        view = views.get(role)
        if view is None:
            continue
        state = states.get(role) or PoolState(plan.aims.sessions, now)
        load = load_of(view.reports)
        limit = learned_limit(state.limit, load, plan.aims, max(0.0, now - state.at))
        wanted = _wanted(role, view, load, orchestrators, plan.aims, limit)
        if wanted is None:
            decisions[role] = Decision(view.num_wanted, "no reports yet")
            continue
        probing = state.probing
        if role == "draft":
            why, probing = _probe(probing, wanted, view, views, now)
            if why is not None:
                wanted = Wanted(1.0, why)
        number, settled = settle(
            state.settled, wanted.num_replicas, view.num_wanted, plan.bounds, now
        )
        after[role] = PoolState(limit, now, settled, probing)
        decisions[role] = Decision(number, wanted.reason)
    return decisions, after


def load_of(reports: tuple[Report, ...]) -> PoolLoad:
    """Add up what the replicas of a pool report."""
    if not reports:
        return PoolLoad()
    number = len(reports)
    return PoolLoad(
        number,
        sum(report.get("num_sessions", 0.0) for report in reports),
        sum(report.get("kv_cache_usage", 0.0) for report in reports),
        sum(report.get("queue_s", 0.0) for report in reports) / number,
        sum(report.get("busy_share", 0.0) for report in reports) / number,
    )


def _probe(
    state: Probing, wanted: Wanted, view: PoolView, views: Mapping[str, PoolView], now: float
) -> tuple[str | None, Probing]:
    """Say whether a draft is to be tried that nobody asks for, and why."""
    orchestrators = views["orchestrator"].reports if "orchestrator" in views else ()
    targets = load_of(views["target"].reports if "target" in views else ())
    return probe(
        state,
        wanted=wanted.num_replicas,
        num_replicas=view.num_wanted,
        num_draftable=sum(item.get("num_draftable", 0.0) for item in orchestrators),
        kv_per_session=targets.kv_used / targets.num_sessions if targets.num_sessions else 0.0,
        now=now,
    )


def _wanted(
    role: str,
    view: PoolView,
    load: PoolLoad,
    orchestrators: tuple[Report, ...],
    aims: Aims,
    limit: float,
) -> Wanted | None:
    """Return what a pool's load asks for; None while nobody says."""
    if role == "gateway":
        number = view.num_requests
        return Wanted(number / aims.sessions, f"{number:.0f} requests, {aims.sessions:g} each")
    if role == "draft":
        demands = [item["draft_demand"] for item in orchestrators if "draft_demand" in item]
        if not demands and not view.reports:
            return None
        return wanted_drafts(load, sum(demands) if demands else None, aims, limit)
    if not view.reports:
        return None
    if role == "target":
        num_waiting = sum(item.get("num_waiting", 0.0) for item in orchestrators)
        return wanted_targets(load, num_waiting, aims, limit)
    number = sum(
        item.get("num_running", 0.0) + item.get("num_waiting", 0.0) for item in view.reports
    )
    return Wanted(number / aims.sessions, f"{number:.0f} requests, {aims.sessions:g} each")
