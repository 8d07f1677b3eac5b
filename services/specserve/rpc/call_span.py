"""The span of one call on a replica: part of its caller's trace, with where the time went."""

from __future__ import annotations

import time

from opentelemetry.trace import SpanKind

from specserve import telemetry
from specserve.errors import SpecServeError
from specserve.model.messages import CallTiming
from specserve.telemetry import SpanData, TraceContext, Tracing


class CallSpan:
    """One call's span, written when the call has ended."""

    def __init__(self, tracing: Tracing, name: str, parent: TraceContext, replica_id: str) -> None:
        self._tracing = tracing
        self._name = name
        self._parent = parent
        self._began_ns = time.time_ns()
        self._attributes: dict[str, telemetry.AttributeValue] = {
            telemetry.ATTRIBUTE_REPLICA: replica_id
        }
        self._error = ""

    def note_timing(self, timing: CallTiming) -> None:
        """Say where an answered call's time went."""
        self._attributes |= {
            telemetry.ATTRIBUTE_QUEUE_S: timing.queue_s,
            telemetry.ATTRIBUTE_FORWARD_S: timing.forward_s,
            telemetry.ATTRIBUTE_BATCH_SIZE: timing.batch_size,
            telemetry.ATTRIBUTE_ROWS: timing.rows,
        }
        if timing.hidden_tokens:
            self._attributes |= {
                telemetry.ATTRIBUTE_HIDDEN_TOKENS: timing.hidden_tokens,
                telemetry.ATTRIBUTE_HIDDEN_S: timing.hidden_s,
            }

    def note_error(self, error: SpecServeError) -> None:
        """Say why the call failed, by the error's class."""
        self._error = type(error).__name__
        self._attributes[telemetry.ATTRIBUTE_ERROR] = self._error

    def end(self) -> None:
        """Export it."""
        self._tracing.export(
            SpanData(
                self._name,
                self._parent.child(),
                self._parent,
                self._began_ns,
                time.time_ns(),
                self._attributes,
                SpanKind.SERVER,
                self._error,
            )
        )


def start_call_span(
    tracing: Tracing, name: str, traceparent: str, replica_id: str
) -> CallSpan | None:
    """Start a span below the caller's; None when the call is not traced."""
    if not traceparent or not tracing.is_on:
        return None
    parent = TraceContext.parse(traceparent)
    if parent is None or not parent.is_sampled:
        return None
    return CallSpan(tracing, name, parent, replica_id)
