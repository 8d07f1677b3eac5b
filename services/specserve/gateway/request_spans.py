"""One request's spans at the gateway: the whole of it, and the parts that are the gateway's own.

Made once it has ended, and exported if its caller or the ratio sampled it, or if it failed, was
slow or had to move. Knows times and counts; knows no text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from specserve import telemetry
from specserve.gateway.answers import Usage
from specserve.gateway.fields import GenerationFields
from specserve.gateway.plan import GenerationPlan
from specserve.rpc.v1.generation_pb2 import SpeculationRecord
from specserve.telemetry import AttributeValue, SpanData, TraceContext, Tracing

PROVIDER = "specserve"


class RequestSpans:
    """One HTTP request's spans; times are those of the observer's clock."""

    def __init__(
        self, operation: str, headers: Mapping[str, str], tracing: Tracing, arrived_at: float
    ) -> None:
        self._tracing = tracing
        self._parent = caller_of(headers)
        self.context = tracing.begin(self._parent)
        self.parsed_at: float | None = None
        """When the body had been read and the pair was known."""
        self.first_token_at: float | None = None
        self.last_block_at: float | None = None
        self.detokenise_s = 0.0
        self._name = operation
        self._arrived_at = arrived_at
        self._arrived_ns = time.time_ns()
        self._planned_at: float | None = None
        self._has_moved = False
        self._attributes: dict[str, AttributeValue] = {
            telemetry.ATTRIBUTE_OPERATION: operation,
            telemetry.ATTRIBUTE_PROVIDER: PROVIDER,
        }

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What links a measurement to this trace; None where nobody recorded one."""
        sampled = self.context.is_sampled
        return {"trace_id": self.context.trace_id_text} if sampled else None

    def on_plan(self, plan: GenerationPlan, body: GenerationFields, now: float) -> None:
        """Note what will be decoded."""
        self._planned_at = now
        if not self._tracing.is_on:
            return
        self._name = f"{self._name} {plan.model}"
        self._attributes |= {
            telemetry.ATTRIBUTE_REQUEST_MODEL: plan.model,
            telemetry.ATTRIBUTE_RESPONSE_MODEL: plan.model,
            telemetry.ATTRIBUTE_RESPONSE_ID: plan.request_id,
            telemetry.ATTRIBUTE_TEMPERATURE: body.temperature,
            telemetry.ATTRIBUTE_TOP_P: body.top_p,
            telemetry.ATTRIBUTE_MAX_TOKENS: plan.max_tokens,
            telemetry.ATTRIBUTE_CHOICE_COUNT: plan.n,
        }
        if body.seed is not None:
            self._attributes[telemetry.ATTRIBUTE_SEED] = body.seed

    def note_record(self, record: SpeculationRecord) -> None:
        """Note what became of a choice."""
        self._has_moved |= record.num_target_reopens > 0 or record.num_failovers > 0

    def end(
        self,
        now: float,
        error: str,
        usage: Usage | None,
        finish_reasons: Sequence[str],
        *,
        is_our_fault: bool,
    ) -> None:
        """Export what is kept."""
        is_notable = is_our_fault or self._has_moved
        duration_s = now - self._arrived_at
        if not self._tracing.keeps(self.context, duration_s, is_notable=is_notable):
            return
        parsed_at = now if self.parsed_at is None else self.parsed_at
        self._part(telemetry.SPAN_GATEWAY_QUEUE, self._arrived_at, parsed_at)
        self._attributes[telemetry.ATTRIBUTE_QUEUE_S] = parsed_at - self._arrived_at
        if self._planned_at is not None:
            self._part(telemetry.SPAN_TOKENISE, parsed_at, self._planned_at)
            self._attributes[telemetry.ATTRIBUTE_TOKENISE_S] = self._planned_at - parsed_at
            self._attributes[telemetry.ATTRIBUTE_DETOKENISE_S] = self.detokenise_s
        if self.last_block_at is not None:
            self._part(telemetry.SPAN_ANSWER, self.last_block_at, now)
        if usage is not None:
            self._attributes[telemetry.ATTRIBUTE_INPUT_TOKENS] = usage.prompt_tokens
            self._attributes[telemetry.ATTRIBUTE_OUTPUT_TOKENS] = usage.completion_tokens
            self._attributes[telemetry.ATTRIBUTE_FINISH_REASONS] = tuple(finish_reasons)
        if error:
            self._attributes[telemetry.ATTRIBUTE_ERROR] = error
        first = self.first_token_at
        self._tracing.export(
            SpanData(
                self._name,
                self.context,
                self._parent,
                self._arrived_ns,
                self._ns(now),
                self._attributes,
                SpanKind.SERVER,
                error,
                events=()
                if first is None
                else ((telemetry.EVENT_FIRST_TOKEN, self._ns(first), {}),),
            )
        )

    def _part(self, name: str, began: float, ended: float) -> None:
        self._tracing.export(
            SpanData(name, self.context.child(), self.context, self._ns(began), self._ns(ended), {})
        )

    def _ns(self, at: float) -> int:
        return self._arrived_ns + int((at - self._arrived_at) * 1e9)


def caller_of(headers: Mapping[str, str]) -> TraceContext | None:
    """Return the span that a request is part of; None when nobody sent one.

    Under Ray Serve the request's own way through Serve lies between the caller and this process,
    and the last part of that is the current span.
    """
    sent = TraceContext.parse(headers.get("traceparent", ""))
    current = trace.get_current_span().get_span_context()
    if current.is_valid and (sent is None or sent.trace_id == current.trace_id):
        return TraceContext(current.trace_id, current.span_id, current.trace_flags.sampled)
    return sent
