"""Which requests are traced, whose word counts, and how an export ends."""

from __future__ import annotations

import threading
import time

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specserve.errors import ConfigurationError
from specserve.telemetry import (
    RoundMetrics,
    SpanData,
    TraceContext,
    Tracing,
    start_tracing,
    tracing,
)
from specserve.telemetry.bounded_labels import OTHER, BoundedLabels
from specserve.tools.held_port import HeldPort

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


def exporting(ratio: float = 1.0, slow_s: float = 10.0) -> tuple[Tracing, InMemorySpanExporter]:
    """Make one that keeps what it exports."""
    exporter = InMemorySpanExporter()
    return Tracing(SimpleSpanProcessor(exporter), ratio, slow_s), exporter


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "00-aa-bb-01",
        f"{PARENT}-01-more",
        f"ff{PARENT[2:]}-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"{PARENT.upper()}-01",
    ],
)
def test_what_is_no_context_is_none(text: str) -> None:
    assert TraceContext.parse(text) is None


@pytest.mark.parametrize("text", [f"{PARENT}-01", f"{PARENT}-00", f" {PARENT}-01 "])
def test_a_context_is_read_and_written(text: str) -> None:
    """Flags beyond `sampled` are not ours to pass on."""
    context = TraceContext.parse(text)

    assert context is not None
    assert context.traceparent == text.strip()
    assert TraceContext.parse(f"01{PARENT[2:]}-03-later") is not None


def test_a_callers_word_wins_over_the_ratio() -> None:
    """Sampled stays so at ratio 0, not sampled at ratio 1; the trace is the caller's."""
    for ratio in (0.0, 1.0):
        traces, _ = exporting(ratio)
        for flags, sampled in (("01", True), ("00", False)):
            parent = TraceContext.parse(f"{PARENT}-{flags}")
            assert parent is not None
            begun = traces.begin(parent)
            assert (begun.trace_id, begun.is_sampled) == (parent.trace_id, sampled)
            assert begun.span_id != parent.span_id


def test_the_ratio_is_kept() -> None:
    """10,000 draws at 0.1: outside of 850 to 1150 once in a million runs."""
    traces, _ = exporting(0.1)
    sampled = sum(traces.begin(None).is_sampled for _ in range(10_000))
    never, _ = exporting(0.0)

    assert 850 < sampled < 1150
    assert not any(never.begin(None).is_sampled for _ in range(1000))
    assert not Tracing(None, 1.0).begin(None).is_sampled


def test_slow_and_notable_requests_are_kept_unsampled() -> None:
    """What is exported is marked as sampled, or the exporter would drop it."""
    traces, exporter = exporting(0.0, slow_s=2.0)
    context = traces.begin(None)
    traces.export(SpanData("late", context, None, 5, 3, {"a": 1}, error="PeerUnavailable"))
    (span,) = exporter.get_finished_spans()

    assert not traces.keeps(context, 1.9, is_notable=False)
    assert traces.keeps(context, 2.0, is_notable=False)
    assert traces.keeps(context, 0.0, is_notable=True)
    assert not Tracing(None).keeps(context, 99.0, is_notable=True)
    assert span.context.span_id == context.span_id
    assert span.context.trace_flags.sampled
    assert (span.start_time, span.end_time) == (5, 5)
    assert span.status.description == "PeerUnavailable"


def test_a_collector_that_is_down_keeps_nobody_from_the_end_B220(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be sent is given up within seconds, be the queue ever so full; twice as well."""
    port = HeldPort()
    monkeypatch.setenv(tracing.ENDPOINT, f"http://127.0.0.1:{port.number}")
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 1)
    try:
        traces = start_tracing("specserve-test")
        traces.export_metrics(RoundMetrics().registry)
        context = traces.begin(None)
        for _ in range(tracing.MAX_QUEUED_SPANS):
            traces.export(SpanData("a", context.child(), context, 1, 2, {}))
        began = time.monotonic()
        traces.shutdown()
        traces.shutdown()
        took_s = time.monotonic() - began
    finally:
        port.release()

    assert not traces.is_on
    assert took_s < 10


def test_no_metrics_go_to_a_collector_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    traces, _ = exporting(1.0)
    before = set(threading.enumerate())
    traces.export_metrics(RoundMetrics().registry)

    assert "otlp-metrics" not in {thread.name for thread in {*threading.enumerate()} - before}


def test_a_service_is_named_by_its_environment_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, version and instance are there; what the environment says of them wins."""
    own = tracing.resource_of("specserve-test").attributes
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,service.instance.id=1")
    given = tracing.resource_of("specserve-test").attributes
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")

    assert own["service.name"] == "specserve-test"
    assert own["service.instance.id"]
    assert own["service.version"]
    assert (given["service.name"], given["service.instance.id"]) == ("mine", "1")
    assert tracing.resource_of("specserve-test").attributes["service.name"] == "ours"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPECSERVE_TRACE_SAMPLE_RATIO", "2"),
        ("SPECSERVE_TRACE_SLOW_S", "soon"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
    ],
)
def test_a_variable_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigurationError, match=name):
        start_tracing("specserve-test")


def test_labels_from_outside_are_held_to_a_number() -> None:
    """The first keep their names; what comes later is `other`, and stays so."""
    labels = BoundedLabels(max_values=2)

    assert labels.of("a", "1") == ("a", "1")
    assert labels.of("b", "1") == ("b", "1")
    assert labels.of("c", "1") == (OTHER, OTHER)
    assert labels.of("a", "1") == ("a", "1")
