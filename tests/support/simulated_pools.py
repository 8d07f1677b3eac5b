"""A day of load on pools whose replicas take time to start and whose reports are old.

Knows how many sessions a replica carries before calls queue; the policy is not told. Time jumps.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specserve.autoscaling.pools import PoolPlan, PoolState, PoolView, Report, decide

DAY_S = 86_400.0
LOOK_S = 10.0
"""Time between two looks of the policy."""

REPORTED_S = 20.0
"""Time that reports are averaged over."""


@dataclass(slots=True)
class SimulatedPool:
    """Replicas of one kind under a number of sessions."""

    capacity: float
    """Sessions that a replica carries before calls queue."""
    kv_per_session: float
    """Share of a replica's KV that one takes."""
    start_s: float = 90.0
    """Time from a decision to a running replica."""
    num_running: int = 1
    num_wanted: int = 1
    starting: deque[float] = field(default_factory=deque)
    changes: list[tuple[float, int]] = field(default_factory=list)
    """(when, how many were asked for)"""
    num_waiting: float = 0.0
    overload_s: float = 0.0
    """Time with more sessions than fit."""

    def wants(self, number: int, now: float) -> None:
        """Ask for replicas; fewer are there at once, more after their start."""
        if number == self.num_wanted:
            return
        self.changes.append((now, number))
        coming = self.num_running + len(self.starting)
        for _ in range(number - coming):
            self.starting.append(now + self.start_s)
        for _ in range(coming - number):
            if self.starting:
                self.starting.pop()
            else:
                self.num_running -= 1
        self.num_wanted = number

    def tick(self, sessions: float, now: float, passed_s: float) -> list[dict[str, float]]:
        """Let time pass; returns what each running replica would report of now."""
        while self.starting and self.starting[0] <= now:
            self.starting.popleft()
            self.num_running += 1
        number = self.num_running
        if number == 0:
            self.num_waiting = 0.0
            return []
        fitting = number / self.kv_per_session
        held = min(sessions, fitting)
        self.num_waiting = sessions - held
        each = held / number
        crowd = each / self.capacity
        if crowd > 1.15 or self.num_waiting:
            self.overload_s += passed_s
        report = {
            "num_sessions": each,
            "kv_cache_usage": min(1.0, each * self.kv_per_session),
            "queue_s": 0.02 if crowd <= 1 else 0.02 + 4 * (crowd - 1),
            "busy_share": min(1.0, crowd),
        }
        return [dict(report) for _ in range(number)]

    @property
    def reversals(self) -> list[float]:
        """Seconds from each change to the next one where that went the other way."""
        found, before = [], 0
        at, number = 0.0, self.changes[0][1] if self.changes else 0
        for now, wanted in self.changes[1:]:
            way = 1 if wanted > number else -1
            if before and way != before:
                found.append(now - at)
            before, at, number = way, now, wanted
        return found


def day(now: float) -> float:
    """Return the share of the day's peak at a time: quiet nights, a peak at 11 and one at 20."""
    hour = now / 3600 % 24
    morning = math.exp(-(((hour - 11) / 2.6) ** 2))
    evening = 0.8 * math.exp(-(((hour - 20) / 1.8) ** 2))
    return min(1.0, 0.08 + 0.92 * max(morning, evening))


@dataclass(slots=True)
class Noise:
    """Slow noise around 1: requests come in spells."""

    sigma: float
    memory_s: float
    source: random.Random
    value: float = 0.0

    def next(self, passed_s: float) -> float:
        kept = math.exp(-passed_s / self.memory_s)
        self.value = kept * self.value + self.source.gauss(0, self.sigma) * math.sqrt(1 - kept**2)
        return max(0.2, 1 + self.value)


@dataclass(slots=True)
class Simulation:
    """Targets, drafts and two orchestrators under one policy."""

    plans: Mapping[str, PoolPlan]
    target: SimulatedPool
    draft: SimulatedPool
    sessions: Callable[[float], float]
    draft_share: Callable[[float], float]
    """Share of the sessions that could use a draft."""
    is_measured: bool = False
    """Whether what drafts are worth is known only by way of a running one."""
    known_share: float = 1.0
    """What is known of it."""
    seed: int = 1
    states: dict[str, PoolState] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def run(self, until_s: float) -> None:
        """Simulate from 0."""
        noise = Noise(0.06, 120.0, random.Random(self.seed))
        history: deque[tuple[list[Report], list[Report], list[Report]]] = deque(
            maxlen=round(REPORTED_S / LOOK_S)
        )
        for step in range(round(until_s / LOOK_S)):
            now = step * LOOK_S
            live = self.sessions(now) * noise.next(LOOK_S)
            targets = self.target.tick(live, now, LOOK_S)
            if self.draft.num_running or not self.is_measured:
                self.known_share = self.draft_share(now)
            demand = live * self.known_share
            drafts = self.draft.tick(demand, now, LOOK_S)
            orchestrators: list[Report] = [
                {
                    "num_running": live / 2,
                    "num_waiting": self.target.num_waiting / 2,
                    "draft_demand": demand / 2,
                    "num_draftable": live / 2,
                }
                for _ in range(2)
            ]
            history.append((list(targets), list(drafts), orchestrators))
            views = {
                "target": PoolView(self.target.num_wanted, _mean([h[0] for h in history])),
                "draft": PoolView(self.draft.num_wanted, _mean([h[1] for h in history])),
                "orchestrator": PoolView(2, _mean([h[2] for h in history])),
            }
            decisions, self.states = decide(self.plans, views, self.states, now)
            for role, pool in (("target", self.target), ("draft", self.draft)):
                decision = decisions[role]
                if decision.num_replicas != pool.num_wanted:
                    self.reasons.append(
                        f"{role}: {pool.num_wanted} -> {decision.num_replicas}: {decision.reason}"
                    )
                pool.wants(decision.num_replicas, now)


def _mean(history: list[list[Report]]) -> tuple[Report, ...]:
    """Average each of the replicas that report now over the looks that it was there at."""
    latest = history[-1]
    means = []
    for number, report in enumerate(latest):
        then = [looked[number] for looked in history if number < len(looked)]
        means.append({key: sum(r[key] for r in then) / len(then) for key in report})
    return tuple(means)
