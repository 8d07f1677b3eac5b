"""Counters of rounds lag behind by some rounds, never beyond a request's end, and lose nothing."""

from __future__ import annotations

import math

from specserve.orchestrator.round_counts import MAX_UNWRITTEN, RoundCounts
from specserve.orchestrator.round_note import CallNote, RoundNote
from specserve.rpc.v1 import common_pb2, requests_pb2
from specserve.telemetry import RoundMetrics, TraceContext

CONTEXT = TraceContext(trace_id=1, span_id=2, is_sampled=False)


def round_note(num_accepted: int) -> RoundNote:
    """A round of 20 ms with four draft tokens: 4 ms for the draft, 10 ms for the target."""
    note = RoundNote(0.0, 0.02, num_draft_tokens=4, num_accepted_tokens=num_accepted)
    for service, forward_s in (("draft", 0.004), ("target", 0.01)):
        timing = common_pb2.CallTiming(forward_s=forward_s)
        model = common_pb2.GetModelResponse(revision=service)
        note.calls.append(
            CallNote(service, "", model, 0.0, forward_s + 0.001, timing, 1, "", False, 1)
        )
    return note


def value(metrics: RoundMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"specserve_orchestrator_{name}_total", labels)


def test_what_was_added_up_is_shown_at_a_requests_end():
    metrics = RoundMetrics()
    counts = RoundCounts(metrics)
    for accepted in (0, 2, 4):
        counts.on_round(round_note(accepted), CONTEXT)
    assert value(metrics, "round_stage_seconds", stage="verify_forward") == 0
    counts.on_end(requests_pb2.RequestRecord(num_rounds=3), None, CONTEXT)

    stages = {
        name: value(metrics, "round_stage_seconds", stage=name)
        for name in ("draft_forward", "verify_forward", "draft_transport", "verify_transport")
    }
    wanted = (0.012, 0.03, 0.003, 0.003)
    for got, seconds in zip(stages.values(), wanted, strict=True):
        assert got is not None
        assert math.isclose(got, seconds)
    assert value(metrics, "num_rejections_per_pos", position="0") == 1
    assert value(metrics, "num_rejections_per_pos", position="2") == 1


def test_a_long_request_does_not_keep_its_counts_to_itself():
    metrics = RoundMetrics()
    counts = RoundCounts(metrics)
    for _ in range(2 * MAX_UNWRITTEN + 5):
        counts.on_round(round_note(1), CONTEXT)
    assert value(metrics, "num_rejections_per_pos", position="1") == 2 * MAX_UNWRITTEN
    counts.write()
    counts.write()
    assert value(metrics, "num_rejections_per_pos", position="1") == 2 * MAX_UNWRITTEN + 5
