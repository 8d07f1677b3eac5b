"""The metrics of /metrics over OTLP as well, every minute: one registry, two ways out.

Knows Prometheus' families and OpenTelemetry's points; counts nothing.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family

logger = logging.getLogger(__name__)

EXPORTER = "OTEL_METRICS_EXPORTER"
INTERVAL_MS = "OTEL_METRIC_EXPORT_INTERVAL"

DEFAULT_INTERVAL_MS = 60_000.0

_CUMULATIVE = AggregationTemporality.CUMULATIVE


class MetricsPush:
    """Exports a registry from a thread of its own, until it is stopped."""

    def __init__(
        self,
        registry: CollectorRegistry,
        exporter: MetricExporter,
        resource: Resource,
        interval_s: float,
    ) -> None:
        self._registry = registry
        self._exporter = exporter
        self._resource = resource
        self._interval_s = interval_s
        self._began_ns = time.time_ns()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Export once more, and end; within this time."""
        self._stopping.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            self._send()
        except Exception:  # one that cannot be made, or sent, must not be the last one
            logger.exception("metrics were not pushed")

    def _send(self) -> None:
        points = metrics_of(self._registry.collect(), self._began_ns, time.time_ns())
        scope = ScopeMetrics(InstrumentationScope("specserve"), points, "")
        self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]))


def is_wanted() -> bool:
    """Say whether metrics are pushed too where traces are: OTEL_METRICS_EXPORTER=none says no."""
    return os.environ.get(EXPORTER, "otlp") != "none"


def metrics_of(families: Iterable[Family], began_ns: int, now_ns: int) -> list[Metric]:
    """Translate Prometheus' families; counters are sums since the process began."""
    found = []
    for family in families:
        data: Sum | Gauge | Histogram
        if family.type == "histogram":
            data = Histogram(_histograms(family, began_ns, now_ns), _CUMULATIVE)
        else:
            is_counter = family.type == "counter"
            numbers = [
                NumberDataPoint(_labels(sample.labels), began_ns, now_ns, float(sample.value))
                for sample in family.samples
                if not is_counter or sample.name.endswith("_total")
            ]
            data = Sum(numbers, _CUMULATIVE, is_monotonic=True) if is_counter else Gauge(numbers)
        if data.data_points:
            found.append(Metric(family.name, family.documentation, "", data))
    return found


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    # Members of a StrEnum are no strings to the encoder.
    return {str(key): str(value) for key, value in labels.items()}


def _histograms(family: Family, began_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    buckets: dict[tuple[tuple[str, str], ...], dict[float, float]] = defaultdict(dict)
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = tuple((key, value) for key, value in _labels(sample.labels).items() if key != "le")
        if sample.name.endswith("_bucket"):
            buckets[labels][float(sample.labels["le"])] = sample.value
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    points = []
    for labels, by_bound in buckets.items():
        bounds = sorted(by_bound)
        upto = [by_bound[bound] for bound in bounds]
        # Prometheus counts what is at most a bound, OTLP what lies between two of them.
        counts = [int(here - before) for before, here in zip([0.0, *upto], upto, strict=False)]
        points.append(
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=began_ns,
                time_unix_nano=now_ns,
                count=int(upto[-1]),
                sum=sums.get(labels, 0.0),
                bucket_counts=counts,
                explicit_bounds=[bound for bound in bounds if math.isfinite(bound)],
                min=math.nan,
                max=math.nan,
            )
        )
    return points
