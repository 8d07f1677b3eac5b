"""Pools follow their load: what is wanted, what comes of it, and a day without swinging.

Swinging is a change of direction: more replicas soon after fewer, or the other way round.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specserve.autoscaling.demand import (
    LEAST_LIMIT_SHARE,
    Aims,
    PoolLoad,
    learned_limit,
    wanted_drafts,
    wanted_targets,
)
from specserve.autoscaling.pools import PoolPlan, PoolState, PoolView, decide
from specserve.autoscaling.probing import Probing, probe
from specserve.autoscaling.serve_policy import PoolsPolicy, load_policy
from specserve.autoscaling.settling import Bounds, Settled, settle
from support.simulated_pools import DAY_S, SimulatedPool, Simulation, day


@dataclass
class Target:
    target_ongoing_requests: float


@dataclass
class Context:
    """What Serve hands to a policy, as far as ours reads it."""

    aggregated_metrics: dict[str, dict[str, float]] | None
    target_num_replicas: int = 3
    config: Target = field(default_factory=lambda: Target(16))


@pytest.mark.parametrize(
    ("metrics", "wanted"),
    [
        ({"num_sessions": {"a": 40, "b": 24}, "num_waiting": {"a": 9, "b": 9}}, 4.0),
        ({"num_running": {"a": 30}, "num_waiting": {"a": 18}}, 3.0),
        ({"num_sessions": {"a": 0.0, "b": 0.0}}, 0.0),
        ({"num_sessions": {"a": 17.0}}, 17 / 16),
        # Nobody has reported yet, or nothing of ours: no reason to change anything.
        ({}, 3.0),
        (None, 3.0),
        ({"num_sessions": {}}, 3.0),
        ({"kv_cache_usage": {"a": 0.9}}, 3.0),
    ],
)
def test_number_of_replicas_brings_each_to_its_target_load(
    metrics: dict[str, dict[str, float]] | None, wanted: float
) -> None:
    assert load_policy(Context(metrics)) == (wanted, {})


TRACE = Path(__file__).parents[1] / "support" / "traces" / "slow_draft.json"

AIMS = Aims(sessions=40)


@pytest.mark.parametrize(
    ("load", "num_waiting", "wanted", "reason"),
    [
        (PoolLoad(2, 80, 0.4), 0, 2.0, "80 sessions, 40 to a replica"),
        (PoolLoad(2, 80, 0.4), 40, 3.0, "40 of them waiting"),
        (PoolLoad(2, 10, 1.75), 0, 2.5, "KV of 1.75 replicas"),
        (PoolLoad(1), 0, 0.0, "0 sessions"),
    ],
)
def test_targets_are_wanted_for_sessions_those_that_wait_and_kv(
    load: PoolLoad, num_waiting: float, wanted: float, reason: str
) -> None:
    """The larger of both; a session that was not admitted wants its place too."""
    found = wanted_targets(load, num_waiting, AIMS, AIMS.sessions)
    assert found.num_replicas == pytest.approx(wanted)
    assert reason in found.reason


def test_slow_draft_does_not_talk_itself_down() -> None:
    """Its replicas hold hardly a session, for hardly a round asks them; what counts is what targets
    could use if it were fast. Where they could use none, none is wanted, whatever it holds."""
    hardly_used = PoolLoad(4, 1, 0.05, queue_s=3.0, busy=1.0)
    assert wanted_drafts(hardly_used, 160, AIMS, 40).num_replicas == 4
    assert wanted_drafts(PoolLoad(), 160, AIMS, 40).num_replicas == 4
    assert wanted_drafts(PoolLoad(4, 90, 2.0), 0, AIMS, 40).num_replicas == 0
    assert wanted_drafts(PoolLoad(2, 90, 0.1), None, AIMS, 40).num_replicas == 2.25
    assert wanted_drafts(PoolLoad(2, 90, 2.1), 40, AIMS, 40).num_replicas == pytest.approx(3)


def test_queue_teaches_how_many_sessions_a_replica_carries() -> None:
    """It is kept when the queue has gone, for more replicas ended it, and forgotten in a day."""
    queued = PoolLoad(2, 60, 1.0, queue_s=2.0, busy=1.0)
    limit = learned_limit(40, queued, AIMS, 10)
    assert limit == pytest.approx(27)
    calm = PoolLoad(3, 60, 1.0, queue_s=0.1, busy=0.7)
    assert learned_limit(limit, calm, AIMS, 300) < 1.1 * limit
    assert learned_limit(limit, calm, AIMS, 90_000) == AIMS.sessions
    idle = PoolLoad(2, 60, 1.0, queue_s=2.0, busy=0.1)
    assert learned_limit(40, idle, AIMS, 0) == 40
    hopeless = PoolLoad(50, 60, 1.0, queue_s=2.0, busy=1.0)
    assert learned_limit(40, hopeless, AIMS, 0) == LEAST_LIMIT_SHARE * 40


BOUNDS = Bounds(min_replicas=0, max_replicas=8, upscale_delay_s=10, downscale_delay_s=300)


def replay(wanted: list[tuple[float, float]], current: int, bounds: Bounds = BOUNDS) -> list[int]:
    """Settle at each (time, wanted); returns what was asked for."""
    state, asked = Settled(), []
    for now, number in wanted:
        current, state = settle(state, number, current, bounds, now)
        asked.append(current)
    return asked


def test_more_comes_after_its_delay_and_at_most_doubles() -> None:
    assert replay([(0, 2.1), (5, 2.1), (10, 2.1)], 2) == [2, 2, 3]
    assert replay([(0, 2.1), (5, 1.0), (10, 2.1), (15, 2.1), (20, 2.1)], 2) == [2, 2, 2, 2, 3]
    assert replay([(0, 9.0), (10, 9.0), (20, 9.0), (30, 9.0)], 2) == [2, 4, 4, 8]
    assert replay([(0, 0.1), (10, 0.1)], 0) == [0, 1]


def test_fewer_come_down_to_the_most_that_was_wanted_in_the_delay() -> None:
    """A dip takes nothing away, nor does a load that just fits fewer; one that is gone does."""
    quiet = [(float(t), 0.0) for t in range(0, 900, 10)]
    assert replay(quiet, 3)[29:31] == [3, 0]
    dip = [(float(t), 2.6 if t % 200 == 0 else 0.5) for t in range(0, 1000, 10)]
    assert set(replay(dip, 4)) == {4}
    tight = [(float(t), 1.9) for t in range(0, 1000, 10)]
    assert set(replay(tight, 3)) == {3}
    roomy = [(float(t), 1.6) for t in range(0, 1000, 10)]
    assert replay(roomy, 3)[-1] == 2


def test_bounds_hold_whatever_is_wanted() -> None:
    bounds = Bounds(2, 4, 0, 0)
    assert replay([(0, 99.0), (1, 99.0), (2, 0.0), (3, 0.0)], 1, bounds) == [2, 4, 2, 2]


PLANS = {
    "target": PoolPlan(Aims(48), Bounds(2, 16, 20, 300)),
    "draft": PoolPlan(Aims(96), Bounds(0, 8, 20, 300)),
}


def simulation(**fields: Any) -> Simulation:
    made: dict[str, Any] = {
        "plans": PLANS,
        "target": SimulatedPool(capacity=60, kv_per_session=1 / 80, num_running=2, num_wanted=2),
        "draft": SimulatedPool(capacity=120, kv_per_session=1 / 300, num_running=0, num_wanted=0),
        "sessions": lambda now: 500 * day(now),
        "draft_share": lambda now: 1.0,
        **fields,
    }
    return Simulation(**made)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_day_is_followed_without_swinging(seed: int) -> None:
    """24 hours with two peaks and noise of 6 %: each pool turns at most four times, as the day does
    itself (up, down, up, down: three turns, and one more for the night that it began in), never
    within half an hour of its last change, and is short of room for less than 1 % of the day."""
    simulated = simulation(seed=seed)
    simulated.run(DAY_S)
    for pool, most in ((simulated.target, 10), (simulated.draft, 5)):
        assert max(number for _, number in pool.changes) >= most, simulated.reasons
        assert len(pool.reversals) <= 4, simulated.reasons
        assert min(pool.reversals) > 1800, simulated.reasons
        assert pool.overload_s < 0.01 * DAY_S
    assert simulated.target.changes[-1][1] <= 4


@pytest.mark.slow
def test_wrong_target_load_is_unlearned_without_swinging() -> None:
    """Replicas carry half of what was configured: the queue teaches it, and the pool stays up. What
    was learned is tried again by and by: that takes hours, and costs one turn down and up."""
    simulated = simulation(
        target=SimulatedPool(capacity=24, kv_per_session=1 / 80, num_running=2, num_wanted=2),
        sessions=lambda now: 200.0,
    )
    simulated.run(DAY_S)
    assert simulated.target.num_wanted >= 8
    assert len(simulated.target.reversals) <= 6, simulated.reasons
    assert simulated.target.overload_s < 0.01 * DAY_S


def test_drafts_come_and_go_with_what_targets_could_use() -> None:
    """None at first, none when acceptance falls, and again when it is back; targets do not care."""
    simulated = simulation(
        sessions=lambda now: 200.0,
        draft_share=lambda now: 0.0 if now % 7200 >= 3600 else 0.7,
    )
    simulated.run(3600.0)
    assert simulated.draft.num_wanted == 2
    simulated.run(7200.0)
    assert simulated.draft.num_wanted == 0
    assert len({number for _, number in simulated.target.changes[1:]}) <= 3


@pytest.mark.slow
def test_drafts_that_are_worth_it_again_are_found_out() -> None:
    """What they are worth shows on a running one alone. A trial finds it out: as many come then as
    are wanted, and stay; and the targets never hear of it."""
    simulated = simulation(
        sessions=lambda now: 200.0,
        draft_share=lambda now: 0.0 if now < 2 * 3600 else 0.7,
        is_measured=True,
    )
    simulated.run(6 * 3600)
    assert simulated.draft.num_wanted == 2, simulated.reasons
    assert any(
        reason.startswith("draft: 0 -> 1: none was worth it 3.0 h ago: one is tried again on")
        for reason in simulated.reasons
    )
    assert len(simulated.target.changes) <= 3


def tried(
    until_s: float,
    *,
    num_draftable: float = 20.0,
    kv_per_session: Callable[[float], float] = lambda now: 0.01,
) -> list[tuple[float, str]]:
    """Look every half minute at a pool of worthless drafts; when and why one was tried."""
    state, num_replicas, found = Probing(), 0, []
    for now in range(0, round(until_s), 30):
        why, state = probe(
            state,
            wanted=0.0,
            num_replicas=num_replicas,
            num_draftable=num_draftable,
            kv_per_session=kv_per_session(now),
            now=now,
        )
        if why is not None and num_replicas == 0:
            found.append((now / 3600, why))
        num_replicas = int(why is not None)
    return found


def test_worthless_drafts_are_tried_again_rarely() -> None:
    """After three hours, then six, then twelve, then once a day: each trial is 20 minutes."""
    trials = [at for at, _ in tried(100 * 3600)]
    assert trials == pytest.approx([3, 9.33, 21.67, 46, 70.33, 94.67], abs=0.1)


def test_sessions_of_another_kind_are_tried_on_sooner() -> None:
    """Twice the KV each, or half of it; not in the first half hour, nor for what comes and goes."""

    def longer(now: float) -> float:
        return 0.01 if now < 600 else 0.025

    (at, why), *_ = tried(2 * 3600, kv_per_session=longer)
    assert 0.5 <= at < 0.7
    assert "sessions hold 2" in why

    def spells(now: float) -> float:
        return 0.03 if 1800 <= now % 3600 < 1920 else 0.01

    (at, why), *_ = tried(4 * 3600, kv_per_session=spells)
    assert at == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("num_draftable", [0.0, 0.4])
def test_no_draft_is_tried_where_nothing_could_be_found_out(num_draftable: float) -> None:
    """Speculation is off, or K is set; or nobody is there."""
    assert tried(100 * 3600, num_draftable=num_draftable) == []


def test_recorded_load_on_a_draft_that_was_switched_off_for_its_slowness() -> None:
    """What a target of 20 ms a step, a draft of 150 ms a token and their orchestrator said under
    2, 10, 2 and no sessions, K chosen automatically: no round asks the draft after the first ones,
    and its sessions are none; it is wanted for ten all the same, and for none only without any."""
    plans = {role: PoolPlan(Aims(4), Bounds(0, 8, 0, 0)) for role in ("target", "draft")}
    current = {"target": 1, "draft": 0}
    states: dict[str, PoolState] = {}
    most = dict(current)
    for row in json.loads(TRACE.read_text()):
        views = {
            role: PoolView(current.get(role, 1), (row[role],))
            for role in ("target", "draft", "orchestrator")
        }
        decisions, states = decide(plans, views, states, row["at_s"])
        current = {role: decision.num_replicas for role, decision in decisions.items()}
        if 14 < row["at_s"] < 29:
            assert row["draft"]["num_sessions"] == 0
            assert current == {"target": 3, "draft": 3}
        most = {role: max(most[role], number) for role, number in current.items()}
    assert most == {"target": 3, "draft": 3}
    assert current == {"target": 0, "draft": 0}


def test_pool_that_nobody_reports_keeps_its_replicas() -> None:
    """As after the controller has been restarted; and what is not scaled is not decided on."""
    views = {"target": PoolView(5), "draft": PoolView(3), "gateway": PoolView(2, (), 400)}
    decisions, states = decide(PLANS, views, {}, 0.0)
    assert {role: d.num_replicas for role, d in decisions.items()} == {"target": 5, "draft": 3}
    assert states == {}


@dataclass
class Pool:
    """A context of Serve's, as far as the application's policy reads it."""

    deployment_name: str
    target_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] | None
    total_num_requests: float = 0.0
    current_time: float = 1000.0


def test_serve_gets_a_number_for_each_scaled_deployment_and_the_log_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reports come by statistic and replica; drafts are sized by the orchestrators' demand."""
    fields = {
        "min_replicas": 0,
        "max_replicas": 8,
        "target_load": 40.0,
        "target_kv_usage": 0.7,
        "target_queue_s": 0.5,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 300.0,
    }
    policy = PoolsPolicy(target=fields, draft=fields, gateway=fields)
    contexts = {
        "t": Pool("target", 2, {"num_sessions": {"a": 60.0, "b": 55.0}, "queue_s": {"a": 0.1}}),
        "d": Pool("draft", 0, {}),
        "o": Pool("orchestrator", 1, {"draft_demand": {"x": 70.0}, "num_waiting": {"x": 10.0}}),
        "g": Pool("gateway", 1, None, total_num_requests=100),
    }
    with caplog.at_level(logging.INFO, "ray.serve"):
        decisions, state = policy(contexts)
    assert (decisions, state) == ({"t": 4, "d": 1, "g": 2}, {})
    for pool in contexts.values():
        pool.current_time += 1
        if pool.deployment_name == "draft":
            pool.target_num_replicas = 1
    assert policy(contexts)[0]["d"] == 2
    assert "pool target: 2 -> 4 replicas: 125 sessions, 10 of them waiting" in caplog.text
    assert "pool draft: 0 -> 1 replicas: 70.0 sessions that could use a draft" in caplog.text
