"""A pool's size follows the sessions in it, which Serve's own policy cannot see."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from specserve.autoscaling import load_policy


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
