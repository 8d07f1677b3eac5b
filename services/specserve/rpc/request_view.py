"""A recorded request as people's tools read it: JSON of the gateway, tables of the terminal.

The one reading of `requests.proto`: names for its numbers, and where each round's seconds went.
Values only; asks nobody.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from specserve.rpc import codec
from specserve.rpc.round_stages import stage_seconds
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

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


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
    """Identity of the replica process."""
    revision: str
    """Revision of its model, or the first digits of the weights' fingerprint."""
    began_s: float
    """Since the request's arrival."""
    wall_s: float
    """Seconds from its start to its end."""
    queue_s: float
    """Seconds before the first forward, or the first round."""
    forward_s: float
    """Seconds in forwards."""
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
    """Replies: more than one with decode-ahead."""
    error: str
    """Class of the error that ended it, `late`, or empty."""
    is_background: bool
    """No round waited for it."""
    epoch: int
    """Epoch of the session: above 1 it was opened anew."""


class RoundView(View):
    """One round, or one call of decode-ahead."""

    began_s: float
    """Since the request's arrival."""
    wall_s: float
    """Seconds from its start to its end."""
    num_speculative_tokens: int
    """K asked for; 0 decodes ahead."""
    reason: str
    """Why the controller chose it."""
    proposer: str | None
    """Who made the draft tokens; null where there were none."""
    num_draft_tokens: int
    """Draft tokens verified."""
    num_accepted_tokens: int
    """Draft tokens accepted."""
    first_rejection: int | None
    """Position of the first rejected draft token; null where none was rejected."""
    num_emitted_tokens: int
    """Tokens emitted, after trimming."""
    committed_length: int
    """Committed tokens afterwards, the prompt included."""
    draft_cached_length: int
    """Of these, tokens whose KV the draft was known to hold."""
    target_cached_length: int
    """The same for the target."""
    target_probs: list[float]
    """p of each draft token; 1 or 0 by equality for greedy and coupled."""
    draft_probs: list[float]
    """q of each draft token; empty where the rule needs none."""
    outcome_cache_hit: bool
    """Draft tokens were there before they were asked for."""
    overlap_s: float
    """Seconds of drafting that ran beside verification, or beside a round, unwaited for."""
    stages: StageSeconds
    """Where its seconds went."""
    calls: list[CallView]
    """Calls that ended in it, in the order of their end."""


class RequestView(View):
    """One choice as one orchestrator decoded it."""

    request_id: str
    """Id of the choice."""
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits: the span of this attempt."""
    sampled: bool
    """Whether the trace was sampled from the start."""
    state: State
    """How far it has come."""
    finish_reason: str | None
    """Why it ended, if it finished."""
    error: str
    """Class of the error that ended it; empty without one."""
    arrived_unix_s: float
    """Arrival, in seconds since 1970."""
    queue_s: float
    """Seconds before the first forward, or the first round."""
    total_s: float
    """Seconds from its arrival to its end, or to now."""
    prompt_length: int
    """Tokens of the prompt."""
    cached_prompt_tokens: int
    """Of these, tokens that the target found in its prefix cache."""
    num_output_tokens: int
    """Tokens emitted."""
    max_tokens: int
    """Most output tokens asked for."""
    num_speculative_tokens: int
    """Most draft tokens per round."""
    method: str | None
    """Proposer; null where none is used."""
    rule: str | None
    """Acceptance rule."""
    attempt: int
    """How often it was sent before, to orchestrators that were lost."""
    carried_over_length: int
    """Output tokens from the attempts before."""
    num_target_reopens: int
    """Times its target session was opened anew."""
    num_late_proposals: int
    """Proposals that missed their round."""
    num_draft_tokens: int
    """Draft tokens verified."""
    num_accepted_draft_tokens: int
    """Draft tokens accepted and emitted."""
    num_rounds: int
    """Rounds, those left out included."""
    num_rounds_left_out: int
    """Rounds that were not kept, for want of room."""
    orchestrator_id: str
    """Identity of the orchestrator process."""
    stages: StageSeconds
    """Of the rounds below; zero without them."""
    overlap_s: float
    """Seconds of drafting that nobody waited for."""
    rounds: list[RoundView]
    """In order; empty in a list of requests."""


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
        target_probs=list(message.target_probs),
        draft_probs=list(message.draft_probs),
        outcome_cache_hit=any(call.hidden_tokens for call in calls),
        overlap_s=background_s + sum(call.hidden_s for call in calls),
        stages=stages_of(message),
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


def stages_of(message: requests_pb2.RoundRecord) -> StageSeconds:
    """Share a round's wall time out among its stages."""
    seconds = stage_seconds(message.wall_s, message.calls)
    return StageSeconds(**{f"{name}_s": value for name, value in seconds.items()})


def _method(number: int) -> str | None:
    """Name a proposer; an orchestrator of a newer build may have others."""
    return next(iter(codec.unpack_methods([number])), None)
