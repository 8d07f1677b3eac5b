"""How many replicas a pool's load asks for: targets by sessions, KV and queue, drafts by demand.

Numbers in, a number and its reason out; bounds, delays and hysteresis are `settling.py`'s. Knows no
Ray and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

RECOVERY_S = 86_400.0
"""Time in which a learned limit doubles, back to what is configured: whether it still holds is
tried by way of fewer replicas, which costs a queue where it does."""

LEAST_LIMIT_SHARE = 0.25
"""Of the configured sessions per replica, how few queues may teach."""

QUEUED_SHARE = 0.9
"""Of the sessions at which calls queued, how many a replica is taken to carry."""

BUSY_SHARE = 0.5
"""A queue before a device that is idle more than this is no sign of too many sessions."""


@dataclass(frozen=True, slots=True)
class Aims:
    """What one replica is to carry."""

    sessions: float
    """Sessions, or requests, per replica."""
    kv_usage: float = 0.7
    """Share of its KV blocks in use."""
    queue_s: float = 0.5
    """Seconds that calls may wait for their first forward."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What the running replicas of one pool report, over the last seconds."""

    num_replicas: int = 0
    """Replicas that report."""
    num_sessions: float = 0.0
    """Sessions held, together."""
    kv_used: float = 0.0
    """KV in use, in replicas' worth: the sum of their shares."""
    queue_s: float = 0.0
    """Seconds that calls wait, the mean over replicas."""
    busy: float = 0.0
    """Share of the time that devices compute, the mean over replicas."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many replicas the load asks for."""

    num_replicas: float
    reason: str
    """For people: the numbers that it follows from."""


def learned_limit(limit: float, load: PoolLoad, aims: Aims, passed_s: float) -> float:
    """Return how many sessions a replica is taken to carry, by what was seen.

    Calls that queue before busy devices show that the sessions there are now are too many, whatever
    was configured. What is learned stays while more replicas make the queue go away, else the pool
    would shrink back into it; it is forgotten over a day.

    Args:
        limit: what was taken so far; `aims.sessions` at first.
        passed_s: since that.
    """
    if load.num_replicas and load.queue_s > aims.queue_s and load.busy >= BUSY_SHARE:
        seen = QUEUED_SHARE * load.num_sessions / load.num_replicas
        return max(LEAST_LIMIT_SHARE * aims.sessions, min(limit, seen))
    return min(aims.sessions, limit * 2 ** (passed_s / RECOVERY_S))


def wanted_targets(load: PoolLoad, num_waiting: float, aims: Aims, limit: float) -> Wanted:
    """Return the targets wanted.

    Args:
        num_waiting: choices in line before the orchestrators: sessions that the targets would hold.
    """
    sessions = load.num_sessions + num_waiting
    by_sessions, by_kv = sessions / limit, load.kv_used / aims.kv_usage
    if by_kv > by_sessions:
        return Wanted(by_kv, _kv_reason(load, aims))
    waiting = f", {num_waiting:.0f} of them waiting" if num_waiting >= 0.5 else ""
    return Wanted(by_sessions, f"{sessions:.0f} sessions{waiting}, {limit:.3g} to a replica")


def wanted_drafts(load: PoolLoad, demand: float | None, aims: Aims, limit: float) -> Wanted:
    """Return the drafts wanted; 0 where targets could use none.

    Args:
        demand: sessions' worth of drafting that targets could use were drafts fast, as the
            orchestrators report it; None where none does. What drafts do at present is no measure:
            a slow draft is used less, and would talk itself down to nothing.
    """
    sessions = load.num_sessions if demand is None else demand
    by_sessions, by_kv = sessions / limit, load.kv_used / aims.kv_usage
    what = "sessions that draft" if demand is None else "sessions that could use a draft"
    if by_kv > by_sessions > 0:
        return Wanted(by_kv, _kv_reason(load, aims))
    return Wanted(by_sessions, f"{sessions:.1f} {what}, {limit:.3g} to a replica")


def _kv_reason(load: PoolLoad, aims: Aims) -> str:
    return f"KV of {load.kv_used:.2f} replicas in use, {aims.kv_usage:g} of each aimed at"
