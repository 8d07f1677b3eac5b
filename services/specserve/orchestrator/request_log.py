"""What is written down of each request: its record in the ring, and its spans.

Knows when a request begins and how it ends; decides nothing about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from specserve.orchestrator.recent_requests import KeptRequest, RecentRequests
from specserve.orchestrator.request_spans import RequestSpans
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.request_trace import RequestTrace
from specserve.orchestrator.round_counts import RoundCounts
from specserve.orchestrator.round_note import RoundNote
from specserve.rpc import codec
from specserve.rpc.v1 import generation_pb2, requests_pb2
from specserve.telemetry import TraceContext, Tracing
from specserve.telemetry.logs import enter_request, leave_request


class LoggedRequest:
    """One Generate call while it runs, and what is known of it afterwards."""

    def __init__(self, trace: RequestTrace, record: requests_pb2.RequestRecord) -> None:
        """Begin.

        Args:
            record: what does not change while it runs.
        """
        self.trace = trace
        self._record = record
        record.state = requests_pb2.REQUEST_STATE_RUNNING

    def admitted(self, state: RequestState) -> None:
        """Note what was asked for; its rounds are noted from now on."""
        state.trace = self.trace
        record = self._record
        record.prompt_length = state.prompt_length
        record.carried_over_length = state.num_output_tokens
        record.max_tokens = state.max_tokens
        record.num_speculative_tokens = state.num_speculative_tokens
        record.method = codec.pack_method(state.method)
        record.rule = codec.pack_rule(state.sampling.rule)

    def note_record(
        self,
        record: generation_pb2.SpeculationRecord,
        finish_reason: generation_pb2.FinishReason,
    ) -> None:
        """Note what speculation did, and why the text ended, if it did."""
        self._record.record.CopyFrom(record)
        self._record.finish_reason = finish_reason

    def end(self, error: BaseException | None) -> None:
        """Note how it ended."""
        self.trace.end()
        gone = isinstance(error, asyncio.CancelledError | GeneratorExit)
        if gone and self._record.finish_reason:
            # Its last block was written: whoever has it may hang up before this call returns.
            self._record.state = requests_pb2.REQUEST_STATE_FINISHED
        elif gone:
            self._record.state = requests_pb2.REQUEST_STATE_CANCELLED
        elif error is not None:
            self._record.state = requests_pb2.REQUEST_STATE_FAILED
            self._record.error = type(error).__name__
        else:
            self._record.state = requests_pb2.REQUEST_STATE_FINISHED

    def summary(self) -> requests_pb2.RequestRecord:
        """Write the record as of now, without rounds."""
        trace = self.trace
        until = trace.clock() if trace.ended_at is None else trace.ended_at
        began = until if trace.decoding_at is None else trace.decoding_at
        record = requests_pb2.RequestRecord()
        record.CopyFrom(self._record)
        record.queue_s = began - trace.arrived_at
        record.total_s = until - trace.arrived_at
        record.num_output_tokens = trace.num_emitted_tokens
        record.num_rounds = trace.num_rounds
        return record


class RequestLog:
    """Writes down every request of one orchestrator."""

    def __init__(
        self, ring: RecentRequests, counts: RoundCounts, tracing: Tracing, orchestrator_id: str
    ) -> None:
        self.ring = ring
        self._counts = counts
        self._tracing = tracing
        self._orchestrator_id = orchestrator_id

    @contextmanager
    def request(
        self, request: generation_pb2.GenerateRequest, parent: TraceContext | None, attempt: int
    ) -> Iterator[LoggedRequest]:
        """Write down one Generate call, whichever way it ends.

        Args:
            parent: the gateway's span; None where nobody sent one.
            attempt: how often the gateway had sent it before.
        """
        spans = RequestSpans(self._tracing, parent, request.request_id, attempt)
        context = spans.context
        entered = enter_request(request.request_id, context)
        kept: KeptRequest

        def on_round(note: RoundNote) -> None:
            self._counts.on_round(note, context)
            record = note.record()
            self.ring.add_round(kept, record.SerializeToString())
            spans.on_round(record, trace)

        trace = RequestTrace(context, on_round)
        logged = LoggedRequest(
            trace,
            requests_pb2.RequestRecord(
                request_id=request.request_id,
                trace_id=context.trace_id_text,
                span_id=context.span_id_text,
                sampled=context.is_sampled,
                arrived_unix_s=trace.arrived_unix_s,
                attempt=attempt,
                orchestrator_id=self._orchestrator_id,
                tenant_salt=request.tenant_salt,
            ),
        )
        kept = self.ring.begin(request.request_id, context.trace_id_text, logged.summary)
        error: BaseException | None = None
        try:
            yield logged
        except BaseException as raised:
            error = raised
            raise
        finally:
            logged.end(error)
            kept.is_finished = True
            record = logged.summary()
            self._counts.on_end(record, trace.first_token_s, context)
            spans.end(record, kept.rounds, trace)
            leave_request(entered)
