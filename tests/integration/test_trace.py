"""One request is one trace: gateway, orchestrator, each round, the draft's and target's part."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider

from helpers.pair import TARGET, Generated, Pair, greedy_tokens, make_request, running_pair
from specserve import telemetry
from specserve.speculation.length_choice import Reason

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
GATEWAY_SPAN_ID = "b7ad6b7169203331"


@dataclass(slots=True)
class Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what is exported over OTLP/gRPC."""

    spans: list[Span] = field(default_factory=list)

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        """Spans of one name, in order of their start."""
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    """Run a collector, and let the services trace to it as their environment tells them."""
    collector = Sink()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    providers: list[TracerProvider] = []
    # The provider of a process can be set once; here it lives for one test.
    monkeypatch.setattr(trace, "set_tracer_provider", providers.append)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    assert telemetry.configure_tracing("specserve-test")
    (provider,) = providers
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield collector
    telemetry.shutdown_tracing()
    server.stop(None)


def attributes(span: Span) -> dict[str, Any]:
    """Read a span's attributes."""
    return {
        item.key: getattr(item.value, str(item.value.WhichOneof("value")))
        for item in span.attributes
    }


async def traced(pair: Pair, flags: str) -> Generated:
    """Run a request as a gateway does that has a span of its own."""
    generated = Generated()
    metadata = (("traceparent", f"00-{TRACE_ID}-{GATEWAY_SPAN_ID}-{flags}"),)
    async for response in pair.stub.Generate(make_request(max_tokens=20), metadata=metadata):
        generated.add(response)
    await pair.until_idle()
    return generated


@pytest.mark.slow
async def test_one_trace_from_the_gateway_to_both_devices(sink: Sink) -> None:
    """One trace id; generate lies below the gateway, rounds below it, services below rounds."""
    async with running_pair() as pair:
        answer = await traced(pair, "01")
    telemetry.shutdown_tracing()
    assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), 20)
    assert answer.record is not None
    assert {span.trace_id.hex() for span in sink.spans} == {TRACE_ID}
    (generate,) = sink.named("orchestrator.generate")
    assert generate.parent_span_id.hex() == GATEWAY_SPAN_ID
    rounds = sink.named(telemetry.SPAN_ROUND)
    assert {span.parent_span_id for span in rounds} == {generate.span_id}
    by_id = {span.span_id: span for span in rounds}
    for name, role in (("spec_draft", "draft"), ("spec_verify", "target")):
        for span in sink.named(name):
            parent = by_id[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            found = attributes(span)
            assert found[telemetry.ATTRIBUTE_REPLICA].startswith(role)
            assert found[telemetry.ATTRIBUTE_FORWARD_S] > 0
            assert found[telemetry.ATTRIBUTE_BATCH_SIZE] == 1
    assert len(sink.named("spec_verify")) == len(rounds)
    assert len(sink.named("spec_draft")) >= answer.record.num_spec_steps
    drafted = [attributes(s)[telemetry.ATTRIBUTE_NUM_DRAFT_TOKENS] for s in rounds]
    accepted = [attributes(s)[telemetry.ATTRIBUTE_NUM_ACCEPTED_TOKENS] for s in rounds]
    assert sum(drafted) == answer.record.num_draft_tokens
    proposers = [attributes(s)[telemetry.ATTRIBUTE_PROPOSER] for s in rounds]
    assert {proposers[i] for i, count in enumerate(drafted) if count} == {"draft_model"}
    assert sum(accepted) >= answer.record.num_accepted_draft_tokens
    lengths = [attributes(s)[telemetry.ATTRIBUTE_COMMITTED_LENGTH] for s in rounds]
    assert lengths == sorted(lengths)
    assert lengths[0] == 4


async def test_no_token_and_no_text_is_recorded(sink: Sink) -> None:
    """Spans hold names of a fixed set, counts and times alone."""
    async with running_pair() as pair:
        await traced(pair, "01")
    telemetry.shutdown_tracing()
    for span in sink.spans:
        for key, value in attributes(span).items():
            if key == telemetry.ATTRIBUTE_LENGTH_REASON:
                assert value in set(Reason)
            elif key == telemetry.ATTRIBUTE_PROPOSER:
                assert value in {"", "draft_model"}
            else:
                assert isinstance(value, (int, float)) or key == telemetry.ATTRIBUTE_REPLICA, key


async def test_unsampled_request_leaves_no_span(sink: Sink) -> None:
    """The gateway's decision not to sample holds in every service."""
    async with running_pair() as pair:
        await traced(pair, "00")
    telemetry.shutdown_tracing()
    assert sink.spans == []


async def test_failed_and_cancelled_requests_end_their_spans(sink: Sink) -> None:
    """A round that its client leaves in the middle is in the trace all the same."""
    async with running_pair(TARGET + ",step_ms=3") as pair:
        call = pair.stub.Generate(make_request(max_tokens=2000))
        await pair.take(call, Generated(), 5)
        call.cancel()
        await pair.until_idle()
    telemetry.shutdown_tracing()
    names = {span.span_id for span in sink.spans}
    for span in sink.spans:
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        assert not span.parent_span_id or span.parent_span_id in names, span.name
