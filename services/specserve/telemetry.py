"""Names, units and set-up of traces and metrics. The only module that reads OTEL_* variables.

Counters, not rates: acceptance rate and mean acceptance length are queries
(accepted / drafted; 1 + accepted / rounds). No prompt and no token text is ever recorded here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics

from specserve.errors import ConfigurationError

SPAN_ROUND = "specserve.round"
SPAN_DRAFT = "spec_draft"
SPAN_VERIFY = "spec_verify"

ATTRIBUTE_NUM_SPECULATIVE_TOKENS = "specserve.num_speculative_tokens"
ATTRIBUTE_LENGTH_REASON = "specserve.length_reason"
ATTRIBUTE_NUM_DRAFT_TOKENS = "specserve.num_draft_tokens"
ATTRIBUTE_NUM_ACCEPTED_TOKENS = "specserve.num_accepted_tokens"
ATTRIBUTE_PROPOSER = "specserve.proposer"
ATTRIBUTE_COMMITTED_LENGTH = "specserve.committed_length"
ATTRIBUTE_DRAFT_CACHED_LENGTH = "specserve.draft.cached_length"
ATTRIBUTE_TARGET_CACHED_LENGTH = "specserve.target.cached_length"
ATTRIBUTE_REPLICA = "specserve.replica"
ATTRIBUTE_QUEUE_S = "specserve.queue_s"
ATTRIBUTE_FORWARD_S = "specserve.forward_s"
ATTRIBUTE_BATCH_SIZE = "specserve.batch_size"
ATTRIBUTE_ROWS = "specserve.rows"
ATTRIBUTE_HIDDEN_TOKENS = "specserve.draft.hidden_tokens"
ATTRIBUTE_HIDDEN_S = "specserve.draft.hidden_s"

# Every counter would have a gauge `..._created` beside it, which a scraper that matches names by
# their beginning adds to the counts.
disable_created_metrics()

_PROPAGATOR = TraceContextTextMapPropagator()


def configure_tracing(service_name: str) -> bool:
    """Export spans over OTLP/gRPC when OTEL_EXPORTER_OTLP_ENDPOINT is set.

    Leaves a provider that somebody else has set (Ray Serve's own tracing) alone.

    Returns:
        Whether spans are recorded.

    Raises:
        ConfigurationError: SPECSERVE_TRACE_SAMPLE_RATIO is no number in [0, 1].
    """
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return True
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return False
    # Imported here: the exporter costs 0.3 s and most processes of a laptop never trace.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )

    text = os.environ.get("SPECSERVE_TRACE_SAMPLE_RATIO", "1")
    try:
        sampler = ParentBased(TraceIdRatioBased(float(text)))
    except ValueError as error:
        raise ConfigurationError(
            f"SPECSERVE_TRACE_SAMPLE_RATIO: {text!r}, a number in [0, 1] was wanted"
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME", service_name)
    provider = TracerProvider(resource=Resource.create({"service.name": name}), sampler=sampler)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=5)))
    trace.set_tracer_provider(provider)
    return True


def shutdown_tracing() -> None:
    """Flush what is left, within five seconds."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.force_flush(5_000)
        provider.shutdown()


def to_traceparent(span: trace.Span) -> str:
    """Write a span's context for a frame; empty when the span is not recorded."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def from_traceparent(traceparent: str) -> Context | None:
    """Read a caller's context; None starts a trace of its own."""
    if not traceparent:
        return None
    return _PROPAGATOR.extract({"traceparent": traceparent})


@dataclass(slots=True)
class RoundMetrics:
    """An orchestrator's counters of rounds. `prometheus_client` appends `_total`.

    A gateway counts the same rounds from its answers under the names users of vLLM know; these have
    a prefix of their own, so that no sum over both jobs counts a round twice.
    """

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    drafts: Counter = field(init=False)
    draft_tokens: Counter = field(init=False)
    accepted_tokens: Counter = field(init=False)
    proposer_drafts: Counter = field(init=False)
    proposer_draft_tokens: Counter = field(init=False)
    proposer_accepted_tokens: Counter = field(init=False)
    accepted_per_position: Counter = field(init=False)
    recovered_tokens: Counter = field(init=False)
    bonus_tokens: Counter = field(init=False)
    plain_tokens: Counter = field(init=False)
    late_proposals: Counter = field(init=False)
    invalid_proposals: Counter = field(init=False)
    target_reopens: Counter = field(init=False)
    preemptions: Counter = field(init=False)
    refused: Counter = field(init=False)
    rounds_by_reason: Counter = field(init=False)
    rounds_by_k: Counter = field(init=False)
    draft_seconds: Counter = field(init=False)
    verify_seconds: Counter = field(init=False)

    def __post_init__(self) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"specserve_orchestrator_{name}", text, labels, registry=self.registry)

        self.drafts = counter("num_drafts", "Rounds that verified a draft {round}")
        self.draft_tokens = counter("num_draft_tokens", "Draft tokens verified {token}")
        self.accepted_tokens = counter(
            "num_accepted_tokens", "Draft tokens accepted and emitted {token}"
        )
        proposer = ("proposer",)  # draft_model, ngram, suffix
        self.proposer_drafts = counter(
            "proposer_num_drafts", "Rounds that verified a draft, by proposer {round}", proposer
        )
        self.proposer_draft_tokens = counter(
            "proposer_num_draft_tokens", "Draft tokens verified, by proposer {token}", proposer
        )
        self.proposer_accepted_tokens = counter(
            "proposer_num_accepted_tokens",
            "Draft tokens accepted and emitted, by proposer {token}",
            proposer,
        )
        self.accepted_per_position = counter(
            "num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in their block {token}",
            ("position",),
        )
        self.recovered_tokens = counter("num_recovered_tokens", "Recovered tokens {token}")
        self.bonus_tokens = counter("num_bonus_tokens", "Bonus tokens {token}")
        self.plain_tokens = counter(
            "num_plain_tokens", "Tokens of rounds without draft tokens {token}"
        )
        self.late_proposals = counter(
            "num_late_proposals", "Proposals that missed their round {proposal}"
        )
        self.invalid_proposals = counter(
            "num_invalid_proposals", "Proposals with ids outside the vocabulary {proposal}"
        )
        self.target_reopens = counter("num_target_reopens", "Target sessions opened anew {session}")
        self.preemptions = counter(
            "num_preemptions", "Target sessions that lost their KV blocks to others {session}"
        )
        self.refused = counter("num_requests_refused", "Choices not admitted in time {request}")
        self.rounds_by_reason = counter(
            "num_rounds_by_reason", "Rounds, by why they had their K {round}", ("reason",)
        )
        self.rounds_by_k = counter(
            "num_rounds_by_num_speculative_tokens",
            "Rounds, by the draft tokens they asked for {round}",
            ("num_speculative_tokens",),
        )
        self.draft_seconds = counter("draft_seconds", "Waited for proposals s")
        self.verify_seconds = counter("verify_seconds", "Waited for verification s")
