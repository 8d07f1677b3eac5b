"""A recorded request as people's tools read it: JSON of the gateway, tables of the terminal.

The one reading of `requests.proto`: names for its numbers, and where each round's seconds went.
Values only; asks nobody.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from specserve.rpc import codec
from specserve.rpc.v1 import common_pb2, generation_pb2, requests_pb2

State = Literal["running", "finished", "failed", "cancelled", "unknown"]

_STATES: dict[int, State] = {
    requests_pb2.REQUEST_STATE_RUNNING: "running",
    requests_pb2.REQUEST_STATE_FINISHED: "finished",
    requests_pb2.REQUEST_STATE_FAILED: "failed",
    requests_pb2.REQUEST_STATE_CANCELLED: "cancelled",
}
_FINISH = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}
_RULES = {
    common_pb2.ACCEPTANCE_RULE_GREEDY: "greedy",
    common_pb2.ACCEPTANCE_RULE_STANDARD: "standard",
    common_pb2.ACCEPTANCE_RULE_COUPLED: "coupled",
}


class View(BaseModel):
    """Base of what is shown."""

    model_config = ConfigDict(frozen=True)


class StageSeconds(View):
    """Where seconds went; they add up to the wall time of what they are of."""

    draft_queue_s: float = 0.0
    """A proposal that was waited for: before its first forward."""
    draft_forward_s: float = 0.0
    """In forwards of the draft that were waited for."""
    draft_transport_s: float = 0.0
    """On the way to the draft and back, event loops included."""
    verify_queue_s: float = 0.0
    """Verification: before its first forward."""
    verify_forward_s: float = 0.0
    """In forwards of the target."""
    verify_transport_s: float = 0.0
    """On the way to the target and back, event loops included."""
    lost_s: float = 0.0
    """In calls that failed or came too late, and in finding another replica."""
    commit_s: float = 0.0
    """The rest: deciding K, accepting, committing, writing the answer."""

    @property
    def total_s(self) -> float:
        """All of them."""
        return float(sum(self.model_dump().values()))


class CallView(View):
    """One call to a draft or target."""

    service: str
    """draft or target."""
    replica_id: str
    revision: str
    began_s: float
    """Since the request's arrival."""
    wall_s: float
    queue_s: float
    forward_s: float
    transport_s: float
    """What is left of wall_s."""
    batch_size: int
    """Sessions in its last forward."""
    rows: int
    """Tokens in its last forward, all sessions together."""
    hidden_tokens: int
    """Draft tokens that were drafted before the call came: a hit of the outcome cache."""
    hidden_s: float
    """Forward time of those, which nobody waited for."""
    num_replies: int
    error: str
    """Class of the error that ended it, `late`, or empty."""
    is_background: bool
    """No round waited for it."""
    epoch: int


class RoundView(View):
    """One round, or one call of decode-ahead."""

    began_s: float
    """Since the request's arrival."""
    wall_s: float
    num_speculative_tokens: int
    """K asked for; 0 decodes ahead."""
    reason: str
    """Why the controller chose it."""
    proposer: str | None
    num_draft_tokens: int
    num_accepted_tokens: int
    first_rejection: int | None
    """Position of the first rejected draft token; null where none was rejected."""
    num_emitted_tokens: int
    committed_length: int
    draft_cached_length: int
    target_cached_length: int
    outcome_cache_hit: bool
    """Draft tokens were there before they were asked for."""
    overlap_s: float
    """Seconds of drafting that ran beside verification, or beside a round, unwaited for."""
    stages: StageSeconds
    calls: list[CallView]


class RequestView(View):
    """One choice as one orchestrator decoded it."""

    request_id: str
    trace_id: str
    span_id: str
    sampled: bool
    state: State
    finish_reason: str | None
    error: str
    arrived_unix_s: float
    queue_s: float
    total_s: float
    prompt_length: int
    cached_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_speculative_tokens: int
    method: str | None
    rule: str | None
    attempt: int
    carried_over_length: int
    num_target_reopens: int
    num_late_proposals: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_rounds: int
    num_rounds_left_out: int
    orchestrator_id: str
    stages: StageSeconds
    """Of the rounds below; zero without them."""
    overlap_s: float
    rounds: list[RoundView]


def view_of(record: requests_pb2.RequestRecord) -> RequestView:
    """Read a record."""
    rounds = [_round(message) for message in record.rounds]
    return RequestView(
        request_id=record.request_id,
        trace_id=record.trace_id,
        span_id=record.span_id,
        sampled=record.sampled,
        state=_STATES.get(record.state, "unknown"),
        finish_reason=_FINISH.get(record.finish_reason),
        error=record.error,
        arrived_unix_s=record.arrived_unix_s,
        queue_s=record.queue_s,
        total_s=record.total_s,
        prompt_length=record.prompt_length,
        cached_prompt_tokens=record.record.cached_prompt_tokens,
        num_output_tokens=record.num_output_tokens,
        max_tokens=record.max_tokens,
        num_speculative_tokens=record.num_speculative_tokens,
        method=_method(record.method),
        rule=_RULES.get(record.rule),
        attempt=record.attempt,
        carried_over_length=record.carried_over_length,
        num_target_reopens=record.record.num_target_reopens,
        num_late_proposals=record.record.num_late_proposals,
        num_draft_tokens=record.record.num_draft_tokens,
        num_accepted_draft_tokens=record.record.num_accepted_draft_tokens,
        num_rounds=record.num_rounds,
        num_rounds_left_out=record.num_rounds_left_out,
        orchestrator_id=record.orchestrator_id,
        stages=add_stages([one.stages for one in rounds]),
        overlap_s=sum(one.overlap_s for one in rounds),
        rounds=rounds,
    )


def add_stages(parts: list[StageSeconds]) -> StageSeconds:
    """Add seconds up, stage by stage."""
    return StageSeconds(
        **{name: sum(getattr(part, name) for part in parts) for name in StageSeconds.model_fields}
    )


def _round(message: requests_pb2.RoundRecord) -> RoundView:
    calls = [_call(call) for call in message.calls]
    accepted, drafted = message.num_accepted_tokens, message.num_draft_tokens
    background_s = sum(call.forward_s for call in calls if call.is_background)
    return RoundView(
        began_s=message.began_s,
        wall_s=message.wall_s,
        num_speculative_tokens=message.num_speculative_tokens,
        reason=message.reason,
        proposer=_method(message.proposer),
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        first_rejection=accepted if accepted < drafted else None,
        num_emitted_tokens=message.num_emitted_tokens,
        committed_length=message.committed_length,
        draft_cached_length=message.draft_cached_length,
        target_cached_length=message.target_cached_length,
        outcome_cache_hit=any(call.hidden_tokens for call in calls),
        overlap_s=background_s + sum(call.hidden_s for call in calls),
        stages=stages_of(message.wall_s, calls),
        calls=calls,
    )


def _call(message: requests_pb2.CallRecord) -> CallView:
    timing = message.timing
    return CallView(
        service=message.service,
        replica_id=message.replica_id,
        revision=message.revision,
        began_s=message.began_s,
        wall_s=message.wall_s,
        queue_s=timing.queue_s,
        forward_s=timing.forward_s,
        transport_s=max(0.0, message.wall_s - timing.queue_s - timing.forward_s),
        batch_size=timing.batch_size,
        rows=timing.rows,
        hidden_tokens=timing.hidden_tokens,
        hidden_s=timing.hidden_s,
        num_replies=message.num_replies,
        error=message.error,
        is_background=message.is_background,
        epoch=message.epoch,
    )


def stages_of(wall_s: float, calls: list[CallView]) -> StageSeconds:
    """Share a round's wall time out among its stages.

    Clocks of two processes are in it, so that a part is never longer than what is left.
    """
    left = wall_s
    seconds = dict.fromkeys(StageSeconds.model_fields, 0.0)

    def take(name: str, wanted: float) -> None:
        nonlocal left
        taken = min(max(0.0, wanted), left)
        seconds[name] += taken
        left -= taken

    failed_until: float | None = None
    for call in calls:
        if call.is_background:
            continue
        if call.error:
            take("lost_s", call.wall_s)
            failed_until = call.began_s + call.wall_s
            continue
        if failed_until is not None:
            take("lost_s", call.began_s - failed_until)
            failed_until = None
        stage = "draft" if call.service == "draft" else "verify"
        take(f"{stage}_forward_s", call.forward_s)
        take(f"{stage}_queue_s", call.queue_s)
        take(f"{stage}_transport_s", call.transport_s)
    seconds["commit_s"] = left
    return StageSeconds(**seconds)


def _method(number: int) -> str | None:
    """Name a proposer; an orchestrator of a newer build may have others."""
    return next(iter(codec.unpack_methods([number])), None)
