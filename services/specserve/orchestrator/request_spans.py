"""A request's spans, made of its records once they are known.

`orchestrator.generate` with one `specserve.round` per decision below it; in each, `spec_draft` and
`spec_verify` as this end of the calls saw them, time on the replica and on the way told apart. A
call that failed has its span too; the one that took its place links to it. Of a request that nobody
sampled nothing is made until its end tells whether it is kept.
"""

from __future__ import annotations

import hashlib

from opentelemetry.trace import SpanKind

from specserve import telemetry
from specserve.orchestrator.request_trace import LATE, RequestTrace
from specserve.rpc import codec
from specserve.rpc.v1 import generation_pb2, requests_pb2
from specserve.telemetry import SpanData, TraceContext, Tracing

MAX_LATE_ROUNDS = 2000
"""Rounds of one request that are exported after the fact, the first ones."""

MIN_PREPARE_SHARE = 0.02
"""Of a round's time: what it takes before a call is a span of its own from here on, so that a
round's children leave no more than a few hundredths of it open, and most rounds need none."""

_SPANS = {"draft": telemetry.SPAN_DRAFT, "target": telemetry.SPAN_VERIFY}


class RequestSpans:
    """One Generate call's spans."""

    def __init__(
        self, tracing: Tracing, parent: TraceContext | None, request_id: str, attempt: int
    ) -> None:
        self._tracing = tracing
        self._parent = parent
        self._request_id = request_id
        self._attempt = attempt
        begun = tracing.begin(parent)
        self.context = TraceContext(
            begun.trace_id, self._span_id(begun.trace_id, attempt), begun.is_sampled
        )
        """Of the whole call."""
        self._failed: dict[str, tuple[TraceContext, requests_pb2.CallRecord, TraceContext]] = {}
        """{service: its last call, if that failed: its span, itself, its round's span}."""

    def on_round(self, record: requests_pb2.RoundRecord, trace: RequestTrace) -> None:
        """Export a round that has ended, if the request is sampled."""
        if self.context.is_sampled:
            self._export_round(record, trace, trace.round_context)

    def end(
        self, record: requests_pb2.RequestRecord, rounds: list[bytes], trace: RequestTrace
    ) -> None:
        """Export what is still to be exported."""
        moved = record.record.num_target_reopens > 0 or self._attempt > 0
        failed = record.state != requests_pb2.REQUEST_STATE_FINISHED
        is_kept = self._tracing.keeps(self.context, record.total_s, is_notable=failed or moved)
        if not is_kept:
            return
        if not self.context.is_sampled:
            for packed in rounds[:MAX_LATE_ROUNDS]:
                kept = requests_pb2.RoundRecord.FromString(packed)
                self._export_round(kept, trace, self.context.child())
        if record.queue_s > 0:
            self._export(
                telemetry.SPAN_ORCHESTRATOR_QUEUE,
                self.context.child(),
                self.context,
                trace,
                0.0,
                record.queue_s,
                {},
            )
        self._export_whole(record, trace)

    def _export_whole(self, record: requests_pb2.RequestRecord, trace: RequestTrace) -> None:
        error = record.error
        if record.state == requests_pb2.REQUEST_STATE_CANCELLED:
            error = telemetry.CANCELLED
        attributes: dict[str, telemetry.AttributeValue] = {
            telemetry.ATTRIBUTE_REQUEST_ID: record.request_id,
            telemetry.ATTRIBUTE_ORCHESTRATOR: record.orchestrator_id,
            telemetry.ATTRIBUTE_INPUT_TOKENS: record.prompt_length,
            telemetry.ATTRIBUTE_OUTPUT_TOKENS: record.num_output_tokens,
            telemetry.ATTRIBUTE_NUM_SPECULATIVE_TOKENS: record.num_speculative_tokens,
            telemetry.ATTRIBUTE_NUM_ROUNDS: record.num_rounds,
            telemetry.ATTRIBUTE_NUM_DRAFT_TOKENS: record.record.num_draft_tokens,
            telemetry.ATTRIBUTE_NUM_ACCEPTED_TOKENS: record.record.num_accepted_draft_tokens,
            telemetry.ATTRIBUTE_NUM_TARGET_REOPENS: record.record.num_target_reopens,
            telemetry.ATTRIBUTE_CACHED_PROMPT_TOKENS: record.record.cached_prompt_tokens,
            telemetry.ATTRIBUTE_ATTEMPT: record.attempt,
            telemetry.ATTRIBUTE_QUEUE_S: record.queue_s,
        }
        if error:
            attributes[telemetry.ATTRIBUTE_ERROR] = error
        links: tuple[TraceContext, ...] = ()
        if self._attempt:
            # An orchestrator that is lost takes its span along; its name is known all the same.
            before = self._span_id(self.context.trace_id, self._attempt - 1)
            links = (TraceContext(self.context.trace_id, before, is_sampled=True),)
        self._tracing.export(
            SpanData(
                telemetry.SPAN_GENERATE,
                self.context,
                self._parent,
                _ns(trace, 0.0),
                _ns(trace, record.total_s),
                attributes,
                SpanKind.SERVER,
                error,
                links,
            )
        )

    def _export_round(
        self, record: requests_pb2.RoundRecord, trace: RequestTrace, context: TraceContext
    ) -> None:
        num_rejected_from = record.num_accepted_tokens
        attributes: dict[str, telemetry.AttributeValue] = {
            telemetry.ATTRIBUTE_NUM_SPECULATIVE_TOKENS: record.num_speculative_tokens,
            telemetry.ATTRIBUTE_LENGTH_REASON: record.reason,
            telemetry.ATTRIBUTE_NUM_DRAFT_TOKENS: record.num_draft_tokens,
            telemetry.ATTRIBUTE_NUM_ACCEPTED_TOKENS: record.num_accepted_tokens,
            telemetry.ATTRIBUTE_NUM_EMITTED_TOKENS: record.num_emitted_tokens,
            telemetry.ATTRIBUTE_PROPOSER: _proposer(record.proposer),
            telemetry.ATTRIBUTE_COMMITTED_LENGTH: record.committed_length,
            telemetry.ATTRIBUTE_TARGET_CACHED_LENGTH: record.target_cached_length,
            telemetry.ATTRIBUTE_DRAFT_CACHED_LENGTH: record.draft_cached_length,
        }
        if num_rejected_from < record.num_draft_tokens:
            attributes[telemetry.ATTRIBUTE_FIRST_REJECTION] = num_rejected_from
        if record.num_draft_tokens:
            attributes[telemetry.ATTRIBUTE_OUTCOME_CACHE_HIT] = any(
                call.timing.hidden_tokens for call in record.calls
            )
        ended_s = record.began_s + record.wall_s
        tokens: dict[str, telemetry.AttributeValue] = {
            telemetry.ATTRIBUTE_TOKEN_ORIGINS: _origins(record)
        }
        if record.target_probs:
            tokens[telemetry.ATTRIBUTE_TARGET_PROBS] = tuple(record.target_probs)
        if record.draft_probs:
            tokens[telemetry.ATTRIBUTE_DRAFT_PROBS] = tuple(record.draft_probs)
        self._tracing.export(
            SpanData(
                telemetry.SPAN_ROUND,
                context,
                self.context,
                _ns(trace, record.began_s),
                _ns(trace, ended_s),
                attributes,
                events=((telemetry.EVENT_TOKENS, _ns(trace, ended_s), tokens),),
            )
        )
        for call in record.calls:
            self._export_call(call, trace, context)
        self._export_own_time(record, trace, context)

    def _export_own_time(
        self, record: requests_pb2.RoundRecord, trace: RequestTrace, context: TraceContext
    ) -> None:
        """Export what a round took between its calls and after the last one."""
        done_s, ended_s = record.began_s, record.began_s + record.wall_s
        calls = [call for call in record.calls if not call.is_background]
        for call in sorted(calls, key=lambda call: call.began_s):
            if call.began_s - done_s > MIN_PREPARE_SHARE * record.wall_s:
                self._export(
                    telemetry.SPAN_PREPARE, context.child(), context, trace,
                    done_s, call.began_s, {},
                )  # fmt: skip
            done_s = max(done_s, call.began_s + call.wall_s)
        if calls and done_s < ended_s:
            self._export(
                telemetry.SPAN_ACCEPT, context.child(), context, trace, done_s, ended_s, {}
            )

    def _export_call(
        self, call: requests_pb2.CallRecord, trace: RequestTrace, round_: TraceContext
    ) -> None:
        timing = call.timing
        transport_s = max(0.0, call.wall_s - timing.queue_s - timing.forward_s)
        attributes: dict[str, telemetry.AttributeValue] = {
            telemetry.ATTRIBUTE_REPLICA: call.replica_id,
            telemetry.ATTRIBUTE_REVISION: call.revision,
            telemetry.ATTRIBUTE_EPOCH: call.epoch,
            telemetry.ATTRIBUTE_NUM_REPLIES: call.num_replies,
        }
        if call.HasField("timing"):
            attributes |= {
                telemetry.ATTRIBUTE_QUEUE_S: timing.queue_s,
                telemetry.ATTRIBUTE_FORWARD_S: timing.forward_s,
                telemetry.ATTRIBUTE_TRANSPORT_S: transport_s,
                telemetry.ATTRIBUTE_BATCH_SIZE: timing.batch_size,
                telemetry.ATTRIBUTE_ROWS: timing.rows,
            }
            if timing.hidden_tokens:
                attributes[telemetry.ATTRIBUTE_HIDDEN_TOKENS] = timing.hidden_tokens
                attributes[telemetry.ATTRIBUTE_HIDDEN_S] = timing.hidden_s
        if call.is_background:
            attributes[telemetry.ATTRIBUTE_IS_BACKGROUND] = True
        parent = self.context if call.is_background else round_
        context = parent.child()
        links: tuple[TraceContext, ...] = ()
        before = self._failed.pop(call.service, None)
        if before is not None:
            links = (before[0],)
            # What lasted for rounds is of none of them.
            within = parent if before[2] is round_ else self.context
            self._export_move(before[0], before[1], call, trace, within)
        if call.error:
            attributes[telemetry.ATTRIBUTE_ERROR] = call.error
            self._failed[call.service] = (context, call, round_)
        self._export(
            _SPANS.get(call.service, call.service),
            context,
            parent,
            trace,
            call.began_s,
            call.began_s + call.wall_s,
            attributes,
            SpanKind.CLIENT,
            "" if call.error == LATE else call.error,
            links,
        )

    def _export_move(
        self,
        context: TraceContext,
        before: requests_pb2.CallRecord,
        call: requests_pb2.CallRecord,
        trace: RequestTrace,
        parent: TraceContext,
    ) -> None:
        """Export the time between a call that failed and the one in its place."""
        if before.error == LATE:
            return
        self._export(
            telemetry.SPAN_FAILOVER, parent.child(), parent, trace,
            before.began_s + before.wall_s, call.began_s,
            {
                telemetry.ATTRIBUTE_ERROR: before.error,
                telemetry.ATTRIBUTE_SERVICE: call.service,
                telemetry.ATTRIBUTE_REPLICA: call.replica_id,
                telemetry.ATTRIBUTE_REPLICA_LEFT: before.replica_id,
            },
            links=(context,),
        )  # fmt: skip

    def _export(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext,
        trace: RequestTrace,
        began_s: float,
        ended_s: float,
        attributes: dict[str, telemetry.AttributeValue],
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
        links: tuple[TraceContext, ...] = (),
    ) -> None:
        self._tracing.export(
            SpanData(
                name, context, parent, _ns(trace, began_s), _ns(trace, ended_s),
                attributes, kind, error, links,
            )
        )  # fmt: skip

    def _span_id(self, trace_id: int, attempt: int) -> int:
        """Name an attempt's span so that the next attempt, elsewhere, can name it too."""
        caller = 0 if self._parent is None else self._parent.span_id
        text = f"{trace_id:032x} {caller:016x} {self._request_id} {attempt}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest) or 1


def _ns(trace: RequestTrace, seconds: float) -> int:
    """Convert seconds since a request's arrival to nanoseconds since 1970."""
    return int((trace.arrived_unix_s + seconds) * 1e9)


def _origins(record: requests_pb2.RoundRecord) -> tuple[str, ...]:
    """Name the origin of each emitted token, in order."""
    if not record.num_draft_tokens:
        return ("plain",) * record.num_emitted_tokens
    is_full = record.num_accepted_tokens == record.num_draft_tokens
    origins = ("accepted",) * record.num_accepted_tokens + ("bonus" if is_full else "recovered",)
    return origins[: record.num_emitted_tokens]


def _proposer(number: generation_pb2.SpeculativeMethod) -> str:
    return codec.unpack_method(number) or ""
