"""A request as text: bars to scale, shares that add up, and nothing left unsaid."""

from __future__ import annotations

import re

from specserve.rpc.request_view import StageSeconds, view_of
from specserve.rpc.v1 import common_pb2, generation_pb2, requests_pb2
from specserve.rpc.v1.requests_pb2 import CallRecord, RequestRecord, RoundRecord
from specserve.tools.waterfall import WIDTH, drawing, lines_of


def call(service: str, began_s: float, wall_s: float, **fields: object) -> CallRecord:
    """Make a call; its timing is `queue_s`, `forward_s` and so on, if any is given."""
    timing = {
        k: fields.pop(k)
        for k in list(fields)
        if k in common_pb2.CallTiming.DESCRIPTOR.fields_by_name
    }
    return CallRecord(
        service=service,
        replica_id=f"{service}-1",
        began_s=began_s,
        wall_s=wall_s,
        timing=common_pb2.CallTiming(**timing) if timing else None,
        **fields,
    )


def record() -> RequestRecord:
    """Make one of three rounds: a target is lost in the second, the third is drafted ahead."""
    return RequestRecord(
        request_id="cmpl-a-0",
        trace_id="0af7",
        state=requests_pb2.REQUEST_STATE_FINISHED,
        finish_reason=generation_pb2.FINISH_REASON_LENGTH,
        num_rounds=5,
        num_rounds_left_out=2,
        total_s=0.1,
        rounds=[
            RoundRecord(
                wall_s=0.010,
                reason="first_round",
                num_emitted_tokens=1,
                calls=[
                    call("target", 0.0, 0.009, queue_s=0.001, forward_s=0.006, rows=9),
                    call("draft", 0.0, 0.004, forward_s=0.004, is_background=True),
                ],
            ),
            RoundRecord(
                began_s=0.010,
                wall_s=0.050,
                num_speculative_tokens=4,
                num_draft_tokens=4,
                num_accepted_tokens=2,
                num_emitted_tokens=3,
                reason="static",
                calls=[
                    call("draft", 0.010, 0.010, forward_s=0.008),
                    call("target", 0.020, 0.020, error="PeerUnavailable"),
                    call("target", 0.045, 0.010, forward_s=0.008),
                ],
            ),
            RoundRecord(
                began_s=0.060,
                wall_s=0.020,
                num_draft_tokens=4,
                num_accepted_tokens=4,
                num_emitted_tokens=5,
                calls=[
                    call("draft", 0.060, 0.002, hidden_tokens=4, hidden_s=0.004),
                    call("target", 0.062, 0.016, forward_s=0.015),
                ],
            ),
        ],
    )


def test_stages_add_up_to_the_wall_time() -> None:
    """B214: also where a call was lost, and where the draft worked beside the round."""
    view = view_of(record())
    totals = [round_.stages.total_s for round_ in view.rounds]
    second = view.rounds[1].stages

    assert [round(total, 9) for total in totals] == [0.010, 0.050, 0.020]
    assert round(view.stages.total_s, 9) == 0.080
    assert round(second.lost_s, 9) == 0.025  # the call, and 5 ms until the next one
    assert view.rounds[0].stages.draft_forward_s == 0
    assert (view.rounds[0].overlap_s, view.rounds[2].overlap_s) == (0.004, 0.004)
    assert view.rounds[2].outcome_cache_hit


def test_no_stage_is_longer_than_its_round() -> None:
    """Replies tell times by other clocks: what they say too much is cut."""
    message = call("target", 0.0, 0.002, forward_s=7.0, queue_s=1.0)
    view = view_of(RequestRecord(rounds=[RoundRecord(wall_s=0.002, calls=[message])]))
    (round_,) = view.rounds

    assert round_.stages == StageSeconds(verify_forward_s=0.002)
    assert round_.calls[0].transport_s == 0


def test_bars_are_to_scale() -> None:
    """The longest round fills the width; drafting ahead is drawn in the verification beside it."""
    view = view_of(record())
    first, second, third = (
        drawing(round_, following, 0.050)
        for round_, following in zip(view.rounds, [*view.rounds[1:], None], strict=True)
    )

    assert len(second) == WIDTH
    assert abs(len(first) - WIDTH / 5) <= 1
    assert abs(second.count("!") - WIDTH / 2) <= 1
    assert second.count("x") == round(WIDTH * 0.004 / 0.050)
    assert "x" not in third
    assert set(third) == set("tvc")


def test_a_request_is_told_whole() -> None:
    """Every replica, every error, rounds that are missing, and shares that make 100 %."""
    text = "\n".join(lines_of(view_of(record())))
    shares = [float(share) for share in re.findall(r"([0-9.]+) %", text)]

    assert "finished: length" in text
    assert "target-1: PeerUnavailable" in text
    assert "draft catches up beside" in text
    assert "4 drafted ahead" in text
    assert "2 more rounds are not shown" in text
    assert abs(sum(shares) - 100) < 0.3
    assert "26.7 ms per token" not in text
    assert "8.9 ms per token, 3.00 a round" in text


def test_a_request_without_rounds_says_so() -> None:
    text = "\n".join(lines_of(view_of(RequestRecord(state=requests_pb2.REQUEST_STATE_RUNNING))))

    assert "no round is remembered" in text
    assert "running" in text
