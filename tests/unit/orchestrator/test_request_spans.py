"""Where a request's spans hang, made of records by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specserve import telemetry
from specserve.orchestrator.request_spans import RequestSpans
from specserve.rpc.v1 import requests_pb2
from specserve.telemetry import Tracing


def call(began_s: float, replica_id: str, error: str = "") -> requests_pb2.CallRecord:
    """Make a draft's call of 10 ms."""
    return requests_pb2.CallRecord(
        service="draft", replica_id=replica_id, began_s=began_s, wall_s=0.01, error=error
    )


@pytest.mark.parametrize("num_rounds_between", [0, 1, 20])
def test_a_move_lies_within_the_span_that_it_hangs_from(num_rounds_between: int) -> None:
    """A draft that is replaced rounds later leaves a gap that is of none of these rounds."""
    exporter = InMemorySpanExporter()
    spans = RequestSpans(Tracing(SimpleSpanProcessor(exporter)), None, "r", 0)
    calls = [call(0.0, "one", "SessionNotFound")]
    rounds = [calls, *([] for _ in range(num_rounds_between - 1))]
    again = call(0.1 * max(0, num_rounds_between) + 0.05, "two")
    if num_rounds_between:
        rounds.append([again])
    else:
        calls.append(again)
    for number, made in enumerate(rounds):
        context = spans.context.child()
        trace = SimpleNamespace(arrived_unix_s=1000.0, round_context=context)
        record = requests_pb2.RoundRecord(began_s=0.1 * number, wall_s=0.1, calls=made)
        spans.on_round(record, cast(Any, trace))

    found = exporter.get_finished_spans()
    (move,) = (span for span in found if span.name == telemetry.SPAN_FAILOVER)
    within = {span.context.span_id: span for span in found}.get(move.parent.span_id)
    if num_rounds_between == 0:
        assert within is not None
        assert within.start_time <= move.start_time <= move.end_time <= within.end_time
    else:
        assert move.parent.span_id == spans.context.span_id
