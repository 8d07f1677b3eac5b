"""The span of one call on a replica: part of its caller's trace, with where the time went."""

from __future__ import annotations

from opentelemetry import trace

from specserve import telemetry
from specserve.errors import SpecServeError
from specserve.model.messages import CallTiming


def start_call_span(
    tracer: trace.Tracer, name: str, traceparent: str, replica_id: str
) -> trace.Span:
    """Start a span below the caller's; one that records nothing when the call is not traced."""
    if not traceparent:
        return trace.INVALID_SPAN
    return tracer.start_span(
        name,
        context=telemetry.from_traceparent(traceparent),
        kind=trace.SpanKind.SERVER,
        attributes={telemetry.ATTRIBUTE_REPLICA: replica_id},
    )


def note_timing(span: trace.Span, timing: CallTiming) -> None:
    """Say where an answered call's time went."""
    if span.is_recording():
        span.set_attributes(
            {
                telemetry.ATTRIBUTE_QUEUE_S: timing.queue_s,
                telemetry.ATTRIBUTE_FORWARD_S: timing.forward_s,
                telemetry.ATTRIBUTE_BATCH_SIZE: timing.batch_size,
                telemetry.ATTRIBUTE_ROWS: timing.rows,
            }
        )
        if timing.hidden_tokens:
            span.set_attributes(
                {
                    telemetry.ATTRIBUTE_HIDDEN_TOKENS: timing.hidden_tokens,
                    telemetry.ATTRIBUTE_HIDDEN_S: timing.hidden_s,
                }
            )


def note_error(span: trace.Span, error: SpecServeError) -> None:
    """Say why a call failed, by the error's class."""
    if span.is_recording():
        span.set_status(trace.StatusCode.ERROR, type(error).__name__)
