"""How a request's record says that it ended."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specserve.orchestrator.recent_requests import RecentRequests
from specserve.orchestrator.request_log import LoggedRequest, RequestLog
from specserve.orchestrator.request_trace import RequestTrace
from specserve.orchestrator.round_counts import RoundCounts
from specserve.rpc.v1 import common_pb2, generation_pb2, requests_pb2
from specserve.speculation.length_choice import Choice, Reason
from specserve.telemetry import RoundMetrics, Tracing
from specserve.telemetry.logs import JsonFormatter

CANCELLED = requests_pb2.REQUEST_STATE_CANCELLED
FINISHED = requests_pb2.REQUEST_STATE_FINISHED
STOP = generation_pb2.FINISH_REASON_STOP
NONE = generation_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize(("reason", "state"), [(STOP, FINISHED), (NONE, CANCELLED)])
def test_who_has_the_last_block_and_hangs_up_has_not_cancelled(reason: int, state: int) -> None:
    trace = RequestTrace()
    logged = LoggedRequest(trace, requests_pb2.RequestRecord())
    logged.note_record(generation_pb2.SpeculationRecord(), reason)
    logged.end(asyncio.CancelledError())
    assert logged.summary().state == state


@dataclass(frozen=True, slots=True)
class _Peer:
    model: common_pb2.GetModelResponse | None = None
    address: str = "127.0.0.1:7002"


def logged_rounds(tracing: Tracing, num_rounds: int) -> None:
    """Write down one request whose rounds ask draft and target once each."""
    log = RequestLog(RecentRequests(8, 1 << 24), RoundCounts(RoundMetrics()), tracing, "one")
    timing = common_pb2.CallTiming(queue_s=0.001, forward_s=0.02, batch_size=16, rows=80)
    request = generation_pb2.GenerateRequest(request_id="request")
    with log.request(request, None, 0) as logged:
        logged.note_record(generation_pb2.SpeculationRecord(), STOP)
        trace = logged.trace
        for number in range(num_rounds):
            trace.begin_round()
            for service in ("draft", "target"):
                trace.note_call(service, _Peer(), trace.clock(), epoch=1, timing=timing)
            trace.note_commit(Choice(4, Reason.STATIC), "draft_model", 4, 2, 3, (number,) * 3)


def num_calls(work: Callable[[], None]) -> int:
    """Count the Python functions that some work calls: the same whatever the clock says."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()  # who looks on at collections would be counted, too
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def test_tracing_costs_an_unsampled_round_nothing_B223() -> None:
    """Not one call more than with tracing off; of a sampled round so many, whatever came before.

    What that is of a token's time `specserve bench --suite telemetry` measures.
    """
    exporter = InMemorySpanExporter()
    sampled = Tracing(SimpleSpanProcessor(exporter), ratio=1.0)
    unsampled = Tracing(SimpleSpanProcessor(exporter), ratio=0.0)
    logged_rounds(sampled, 2)  # what is made once is made

    def per_round(tracing: Tracing, few: int, many: int) -> float:
        logged_rounds(tracing, few)
        one, other = (num_calls(lambda n=n: logged_rounds(tracing, n)) for n in (few, many))
        return (other - one) / (many - few)

    off = per_round(Tracing(), 10, 60)
    exporter.clear()
    assert per_round(unsampled, 10, 60) == off
    assert exporter.get_finished_spans() == ()
    early, late = per_round(sampled, 10, 60), per_round(sampled, 200, 250)
    assert early == pytest.approx(late, rel=0.02)
    assert off < early < 6 * off


def test_a_line_after_a_request_is_not_its_line() -> None:
    """Whatever the task does next, be it the next request or none."""
    logged_rounds(Tracing(), 1)
    line = JsonFormatter().format(logging.LogRecord("x", logging.INFO, "", 0, "after", (), None))
    assert "request_id" not in json.loads(line)
