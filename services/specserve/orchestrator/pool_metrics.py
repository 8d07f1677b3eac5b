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
from specserve.orchestrator.round_note import revision_of
from specserve.telemetry.bounded_labels import BoundedLabels

STATES = ("usable", "draining", "refused", "unchecked", "lost")


class PoolCollector(Collector):
    """Replicas by pool and state, counted when they are scraped."""

    def __init__(self, pools: Callable[[], Iterable[Pool[Any, Any]]]) -> None:
        self._pools = pools
        self._labels = BoundedLabels()

    def collect(self) -> Iterable[Metric]:
        """Give everything as of now."""
        replicas = GaugeMetricFamily(
            f"{PREFIX}_num_replicas",
            "Replicas known, by whether sessions may be opened there {replica}",
            labels=("pool", "state"),
        )
        served = GaugeMetricFamily(
            f"{PREFIX}_model_replicas",
            "Usable replicas, by what they serve {replica}",
            labels=("pool", "model", "revision"),
        )
        for pool in self._pools():
            counts = count_states(pool)
            for state in STATES:
                replicas.add_metric([pool.kind.pool, state], counts[state])
            for labels, count in self._models(pool).items():
                served.add_metric([pool.kind.pool, *labels], count)
        yield from (replicas, served)

    def _models(self, pool: Pool[Any, Any]) -> Counter[tuple[str, ...]]:
        """Count a pool's usable replicas by model and revision."""
        return Counter(
            self._labels.of(link.model.model_id, revision_of(link.model))
            for link in pool.usable()
            if link.model is not None
        )


def count_states(pool: Pool[Any, Any]) -> Counter[str]:
    """Count a pool's replicas by state."""
    usable = set(map(id, pool.usable()))
    counts: Counter[str] = Counter()
    for link in list(pool.links.values()):
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
