"""What a loop's histogram exports is what the library's own one would."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.exposition import generate_latest

from specserve.telemetry.loop_histogram import LoopHistogram

BUCKETS = (0.1, 1.0, 10.0)
VALUES = (0.05, 0.1, 0.2, 5.0, 5.0, 11.0)


def lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return sorted(line for line in text.splitlines() if "_created" not in line)


def test_it_exports_what_the_librarys_histogram_does():
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x_seconds", "Text", ("service",), buckets=BUCKETS, registry=theirs)
    quick = LoopHistogram("x_seconds", "Text", BUCKETS, ours, "service", ("draft", "target"))
    for service in ("draft", "target"):
        for value in VALUES:
            histogram.labels(service).observe(value)
            quick.of(service).observe(value)
    assert lines(ours) == lines(theirs)


def test_an_exemplar_stays_with_its_bucket():
    registry = CollectorRegistry()
    quick = LoopHistogram("x_seconds", "Text", BUCKETS, registry)
    quick.of().observe(5.0, {"trace_id": "ab"})
    quick.of().observe(5.0)
    (line,) = [one for one in lines(registry) if "trace_id" in one]
    assert line.startswith('x_seconds_bucket{le="10.0"} 2.0 # {trace_id="ab"} 5.0 ')


def test_a_name_can_be_taken_once():
    registry = CollectorRegistry()
    LoopHistogram("x_seconds", "Text", BUCKETS, registry)
    with pytest.raises(ValueError, match="x_seconds"):
        Histogram("x_seconds", "Text", registry=registry)
