"""A histogram for values that come many times a millisecond, all from one thread.

`prometheus_client.Histogram` takes two locks a value, an event loop needs none. What is exported is
the same. Knows numbers and Prometheus; knows no meaning.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """Counts by bucket, for each value of at most one label whose values are known beforehand."""

    def __init__(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        label: str = "",
        values: Sequence[str] = ("",),
    ) -> None:
        """Register a histogram.

        Args:
            buckets: upper ends, ascending, without infinity.
            label: its name; empty for none.
            values: what it may be.
        """
        self._name, self._text, self._label = name, text, label
        self._bounds = tuple(buckets)
        self._series = {value: LoopSeries(self._bounds) for value in values}
        registry.register(self)

    def of(self, value: str = "") -> LoopSeries:
        """Give what is counted under a value of the label."""
        return self._series[value]

    def collect(self) -> Iterable[Metric]:
        """Give what was counted so far, to any thread."""
        labels = [self._label] if self._label else []
        family = HistogramMetricFamily(self._name, self._text, labels=labels)
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        for value, series in self._series.items():
            total = 0
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for bound, count, exemplar in zip(bounds, series.counts, series.exemplars, strict=True):
                total += count
                buckets.append((bound, total, exemplar) if exemplar else (bound, total))
            family.add_metric([value] if labels else [], buckets, series.total)
        return [family]

    def describe(self) -> Iterable[Metric]:
        """Name what is exported."""
        return [HistogramMetricFamily(self._name, self._text)]


class LoopSeries:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """[buckets + 1] values in each, none in two."""
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Count a value; `exemplar` are the labels that lead to where it came from."""
        index = bisect_left(self._bounds, value)
        self.counts[index] += 1
        self.total += value
        if exemplar is not None:
            self.exemplars[index] = Exemplar(dict(exemplar), value, time.time())
