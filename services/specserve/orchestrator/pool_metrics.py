"""How many replicas an orchestrator knows, by what it may do with them.

`refused` is the one to be alarmed by: a replica answers, but another vocabulary, other weights or
another protocol keep it from use, and the log says which. Knows pools; knows no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specserve.orchestrator.pool import Pool
from specserve.orchestrator.process_metrics import PREFIX

STATES = ("usable", "draining", "refused", "unchecked", "lost")


class PoolCollector(Collector):
    """Replicas by pool and state, counted when they are scraped."""

    def __init__(self, pools: Callable[[], Iterable[Pool[Any, Any]]]) -> None:
        self._pools = pools

    def collect(self) -> Iterable[Metric]:
        """Give everything as of now."""
        replicas = GaugeMetricFamily(
            f"{PREFIX}_num_replicas",
            "Replicas known, by whether sessions may be opened there {replica}",
            labels=("pool", "state"),
        )
        for pool in self._pools():
            counts = count_states(pool)
            for state in STATES:
                replicas.add_metric([pool.kind.pool, state], counts[state])
        yield replicas


def count_states(pool: Pool[Any, Any]) -> Counter[str]:
    """Count a pool's replicas by state."""
    usable = set(map(id, pool.usable()))
    counts: Counter[str] = Counter()
    for link in pool.links.values():
        replica_id = link.model.replica_id if link.model else ""
        if not link.connected:
            counts["lost"] += 1
        elif replica_id in pool.refusals:
            counts["refused"] += 1
        elif id(link) in usable:
            counts["usable"] += 1
        elif link.draining or link.retired:
            counts["draining"] += 1
        else:
            counts["unchecked"] += 1
    return counts
