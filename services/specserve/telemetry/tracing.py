"""Which requests are traced, and the export of their spans. Set up by OTEL_* alone.

A span is written once it has ended, from the times that were noted: so a request that turns out
slow or failed is kept although nobody sampled it. Each service owns its `Tracing`; no provider is
set for the process, where Ray Serve may have its own.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from prometheus_client import CollectorRegistry

from specserve.errors import ConfigurationError
from specserve.telemetry import metrics_push
from specserve.telemetry.context import TraceContext, new_span_id, new_trace_id
from specserve.telemetry.metrics_push import MetricsPush

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
SAMPLE_RATIO = "SPECSERVE_TRACE_SAMPLE_RATIO"
SLOW_S = "SPECSERVE_TRACE_SLOW_S"

DEFAULT_SLOW_S = 10.0
"""A request at least this long is kept, sampled or not."""

MAX_QUEUED_SPANS = 16_384
"""Spans that wait for the exporter; more are dropped. A long request that is kept after the fact
hands over some thousand at once."""

EXPORT_TIMEOUT_S = 5
"""Longest that an export, and with it the end of a process, may take."""

_LOW_64_BITS = (1 << 64) - 1

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[float]
Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class SpanData:
    """One span that has ended."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    began_ns: int
    """Since 1970."""
    ended_ns: int
    attributes: Attributes
    kind: SpanKind = SpanKind.INTERNAL
    error: str = ""
    """Class of the error that ended it; no message, which may quote what a client sent."""
    links: tuple[TraceContext, ...] = ()
    events: tuple[tuple[str, int, Attributes], ...] = ()
    """(name, nanoseconds since 1970, attributes)."""


@dataclass(slots=True)
class Tracing:
    """One service's traces; without a processor contexts are made and nothing is exported."""

    processor: SpanProcessor | None = None
    ratio: float = 1.0
    """Share of the requests without a caller's word that are sampled."""
    slow_s: float = DEFAULT_SLOW_S
    resource: Resource = field(default_factory=lambda: Resource({}))
    exporter: SpanExporter | None = None
    """What the processor hands spans to, to be stopped before it."""
    _pushes: list[MetricsPush] = field(default_factory=list)
    _scope: InstrumentationScope = field(default_factory=lambda: InstrumentationScope("specserve"))

    @property
    def is_on(self) -> bool:
        """Whether anything is exported."""
        return self.processor is not None

    @property
    def is_pushing(self) -> bool:
        """Whether metrics are exported, too."""
        return bool(self._pushes)

    def begin(self, parent: TraceContext | None) -> TraceContext:
        """Make the context of a request's span; what the caller says of sampling holds."""
        if parent is not None:
            sampled = parent.is_sampled and self.is_on
            return TraceContext(parent.trace_id, new_span_id(), sampled)
        trace_id = new_trace_id()
        # As the SDK's TraceIdRatioBased decides, so that Ray Serve's proxy would decide alike.
        sampled = self.is_on and (trace_id & _LOW_64_BITS) < round(self.ratio * (1 << 64))
        return TraceContext(trace_id, new_span_id(), sampled)

    def keeps(self, context: TraceContext, duration_s: float, *, is_notable: bool) -> bool:
        """Say whether a request's spans are exported, now that it has ended.

        Args:
            is_notable: it failed, was cancelled, or had to move.
        """
        return self.is_on and (context.is_sampled or is_notable or duration_s >= self.slow_s)

    def export(self, span: SpanData) -> None:
        """Hand a span to the exporter's thread."""
        if self.processor is None:
            return
        self.processor.on_end(
            ReadableSpan(
                span.name,
                _span_context(span.context, is_remote=False),
                None if span.parent is None else _span_context(span.parent, is_remote=True),
                self.resource,
                dict(span.attributes),
                [Event(name, attributes, at) for name, at, attributes in span.events],
                [Link(_span_context(link, is_remote=True)) for link in span.links],
                span.kind,
                status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
                start_time=span.began_ns,
                end_time=max(span.began_ns, span.ended_ns),
                instrumentation_scope=self._scope,
            )
        )

    def export_metrics(self, registry: CollectorRegistry) -> None:
        """Push a registry's metrics as well, from now to the shutdown, where spans are exported."""
        # A processor that was handed in names no collector, and a default one is nobody's wish.
        is_named = bool(os.environ.get(ENDPOINT))
        if not self.is_on or not is_named or not metrics_push.is_wanted():
            return
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415
            OTLPMetricExporter,
        )

        interval_ms = number_from_environment(
            metrics_push.INTERVAL_MS, metrics_push.DEFAULT_INTERVAL_MS, most=float("inf")
        )
        exporter = OTLPMetricExporter(timeout=EXPORT_TIMEOUT_S)
        self._pushes.append(
            MetricsPush(registry, exporter, self.resource, max(interval_ms, 10.0) / 1000)
        )

    def shutdown(self) -> None:
        """Export what is left, within seconds. Idempotent."""
        while self._pushes:
            self._pushes.pop().stop(EXPORT_TIMEOUT_S)
        if self.processor is not None:
            processor, self.processor = self.processor, None
            # The SDK takes no notice of a flush's time limit: a full queue may take minutes.
            _run_for(EXPORT_TIMEOUT_S, processor.force_flush)
            if self.exporter is not None:
                self.exporter.shutdown()
            _run_for(EXPORT_TIMEOUT_S, processor.shutdown)


def _run_for(seconds: float, work: Callable[[], object]) -> None:
    """Run something and wait for it, so long at most."""
    thread = threading.Thread(target=work, name="otlp-end", daemon=True)
    thread.start()
    thread.join(seconds)


_UNSET = Status(StatusCode.UNSET)


def _span_context(context: TraceContext, *, is_remote: bool) -> SpanContext:
    # What is exported is kept, whatever was decided when it began.
    return SpanContext(context.trace_id, context.span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


def start_tracing(service_name: str) -> Tracing:
    """Export spans over OTLP/gRPC when OTEL_EXPORTER_OTLP_ENDPOINT is set.

    Raises:
        ConfigurationError: a variable is no number in its range, or wants another protocol.
    """
    ratio = number_from_environment(SAMPLE_RATIO, 1.0, most=1.0)
    slow_s = number_from_environment(SLOW_S, DEFAULT_SLOW_S, most=float("inf"))
    if not os.environ.get(ENDPOINT):
        return Tracing(None, ratio, slow_s)
    if (protocol := os.environ.get(PROTOCOL) or "grpc") != "grpc":
        # Sent to a port for HTTP, every export would fail without anybody seeing why.
        raise ConfigurationError(
            f"{PROTOCOL}: found {protocol!r}, spans and metrics go over 'grpc'"
        )
    # Imported here: the exporter costs 0.3 s and most processes of a laptop never trace.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    exporter = OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)
    return Tracing(
        BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED_SPANS),
        ratio,
        slow_s,
        resource_of(service_name),
        exporter,
    )


def resource_of(service_name: str) -> Resource:
    """Name the service and its version; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    own = {"service.name": service_name, "service.instance.id": str(uuid.uuid4())}
    with suppress(metadata.PackageNotFoundError):
        own["service.version"] = metadata.version("specserve")
    given = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in own.items() if name not in given})


def number_from_environment(name: str, default: float, *, most: float) -> float:
    """Read a number in [0, most].

    Raises:
        ConfigurationError: it is none.
    """
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most:
        wanted = f"a number in [0, {most:g}]" if most < float("inf") else "a number >= 0"
        raise ConfigurationError(f"{name}: {text!r}, {wanted} was wanted")
    return value
