"""A real OTLP/gRPC receiver in this process, and what a trace must look like."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(slots=True)
class Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what is exported over OTLP/gRPC."""

    spans: list[Span] = field(default_factory=list)
    points: dict[str, float] = field(default_factory=dict)
    """{metric: the latest sum, value or count of all its points}, over OTLP metrics."""
    services: set[str] = field(default_factory=set)
    """Names of those who exported."""
    _came: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            self.services |= {
                item.value.string_value
                for item in resource.resource.attributes
                if item.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans
        with self._came:
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, condition: Callable[[], object], within_s: float) -> None:
        """Wait until spans that have come make it true; leave that to the test when time is over.

        Args:
            condition: looked at whenever more have come.
        """
        with self._came:
            self._came.wait_for(condition, within_s)

    def take_metrics(self, request: Any) -> None:
        """Keep the latest points."""
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    data = getattr(metric, metric.WhichOneof("data")).data_points
                    is_histogram = metric.WhichOneof("data") == "histogram"
                    values = [p.count if is_histogram else p.as_double or p.as_int for p in data]
                    self.points[metric.name] = sum(values)

    def named(self, name: str) -> list[Span]:
        """Spans of one name, in order of their start."""
        return self.of([span for span in self.spans if span.name == name])

    def in_trace(self, trace_id: str) -> list[Span]:
        """Spans of one trace, in order of their start."""
        return self.of([span for span in self.spans if span.trace_id.hex() == trace_id])

    @staticmethod
    def of(spans: Sequence[Span]) -> list[Span]:
        """Put spans in order of their start."""
        return sorted(spans, key=lambda span: span.start_time_unix_nano)


class MetricsSink(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Takes metrics for a sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def Export(self, request: Any, context: Any) -> Any:
        self._sink.take_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def receiving() -> Iterator[tuple[Sink, str]]:
    """Run a receiver; gives it and its endpoint."""
    sink = Sink()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(MetricsSink(sink), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield sink, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def attributes(span: Span) -> dict[str, Any]:
    """Read a span's attributes."""
    return {
        item.key: getattr(item.value, str(item.value.WhichOneof("value")))
        for item in span.attributes
    }


def children(parent: Span, spans: Sequence[Span]) -> list[Span]:
    """Return what lies directly below a span."""
    return [span for span in spans if span.parent_span_id == parent.span_id]


def coverage(parent: Span, spans: Sequence[Span]) -> float:
    """Return the share of a span's time that what lies below it covers."""
    children: dict[bytes, list[Span]] = {}
    for span in spans:
        children.setdefault(span.parent_span_id, []).append(span)
    below, todo = [], [parent.span_id]
    while todo:
        found = children.get(todo.pop(), [])
        below += found
        todo += [span.span_id for span in found]
    began, ended = parent.start_time_unix_nano, parent.end_time_unix_nano
    covered, until = 0, began
    for span in sorted(below, key=lambda one: one.start_time_unix_nano):
        start = max(span.start_time_unix_nano, until)
        end = min(span.end_time_unix_nano, ended)
        if end > start:
            covered += end - start
            until = end
    return covered / max(1, ended - began)
