"""One request is one trace: gateway, orchestrator, each round, the draft's and target's part."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import grpc
import pytest

from helpers.pair import (
    TARGET,
    Generated,
    Pair,
    greedy_tokens,
    make_request,
    make_target,
    running_pair,
)
from helpers.spans import Sink, attributes, children, coverage, receiving
from helpers.waiting import eventually
from specserve import cli, telemetry
from specserve.rpc.request_view import view_of
from specserve.rpc.v1 import requests_pb2, requests_pb2_grpc
from specserve.speculation.length_choice import Reason

NAMES = {
    telemetry.ATTRIBUTE_REPLICA,
    telemetry.ATTRIBUTE_REVISION,
    telemetry.ATTRIBUTE_ORCHESTRATOR,
    telemetry.ATTRIBUTE_REQUEST_ID,
}
"""Attributes that name something."""

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
GATEWAY_SPAN_ID = "b7ad6b7169203331"


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    """Run a collector, and let the services trace to it as their environment tells them."""
    with receiving() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        yield collector


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
    """One trace id; generate lies below the gateway, rounds below it, calls below rounds.

    B214: what a handler of a stream of frames records is in the request's trace. B221: spans are as
    many as rounds and calls, whatever the number of tokens and of chunks.
    """
    async with running_pair() as pair:
        answer = await traced(pair, "01")
    assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), 20)
    assert answer.record is not None
    assert {span.trace_id.hex() for span in sink.spans} == {TRACE_ID}
    (generate,) = sink.named("orchestrator.generate")
    assert generate.parent_span_id.hex() == GATEWAY_SPAN_ID
    rounds = sink.named(telemetry.SPAN_ROUND)
    assert {span.parent_span_id for span in rounds} == {generate.span_id}
    by_id = {span.span_id: span for span in (*rounds, generate)}
    for ours, theirs, role in (
        ("spec_draft", "draft.propose", "draft"),
        ("spec_verify", "target.verify", "target"),
    ):
        for span in (*sink.named(ours), *sink.named(theirs)):
            assert span.parent_span_id in by_id
            found = attributes(span)
            assert found[telemetry.ATTRIBUTE_REPLICA].startswith(role)
            assert found[telemetry.ATTRIBUTE_FORWARD_S] > 0
            assert found[telemetry.ATTRIBUTE_BATCH_SIZE] == 1
        for span in sink.named(ours):
            found = attributes(span)
            assert found[telemetry.ATTRIBUTE_TRANSPORT_S] >= 0
            assert len(found[telemetry.ATTRIBUTE_REVISION]) == 12
        assert len(sink.named(ours)) == len(sink.named(theirs))
    calls = [*sink.named("spec_verify"), *sink.named("spec_draft")]
    assert len(sink.named("spec_accept")) == len(rounds)
    prepared = len(sink.named("spec_prepare"))
    assert prepared <= len(calls)
    assert len(sink.spans) == 2 + 2 * len(rounds) + 2 * len(calls) + prepared
    assert len(sink.named("spec_verify")) == len(rounds)
    assert len(sink.named("spec_draft")) >= answer.record.num_spec_steps
    drafted = [attributes(s)[telemetry.ATTRIBUTE_NUM_DRAFT_TOKENS] for s in rounds]
    accepted = [attributes(s)[telemetry.ATTRIBUTE_NUM_ACCEPTED_TOKENS] for s in rounds]
    assert sum(drafted) == answer.record.num_draft_tokens
    assert attributes(generate)[telemetry.ATTRIBUTE_NUM_DRAFT_TOKENS] == sum(drafted)
    rejections = [attributes(s).get(telemetry.ATTRIBUTE_FIRST_REJECTION) for s in rounds]
    assert rejections == [a if a < d else None for a, d in zip(accepted, drafted, strict=True)]
    hits = [attributes(s).get(telemetry.ATTRIBUTE_OUTCOME_CACHE_HIT) for s in rounds]
    assert hits == [False if d else None for d in drafted]
    proposers = [attributes(s)[telemetry.ATTRIBUTE_PROPOSER] for s in rounds]
    assert {proposers[i] for i, count in enumerate(drafted) if count} == {"draft_model"}
    assert sum(accepted) >= answer.record.num_accepted_draft_tokens
    lengths = [attributes(s)[telemetry.ATTRIBUTE_COMMITTED_LENGTH] for s in rounds]
    assert lengths == sorted(lengths)
    assert lengths[0] == 4
    emitted = [attributes(s)[telemetry.ATTRIBUTE_NUM_EMITTED_TOKENS] for s in rounds]
    assert sum(emitted) == 20


async def test_no_token_and_no_text_is_recorded(sink: Sink) -> None:
    """B224: spans hold names of a fixed set, counts and times alone."""
    async with running_pair() as pair:
        await traced(pair, "01")
    for span in sink.spans:
        for key, value in attributes(span).items():
            if key == telemetry.ATTRIBUTE_LENGTH_REASON:
                assert value in set(Reason)
            elif key == telemetry.ATTRIBUTE_PROPOSER:
                assert value in {"", "draft_model"}
            else:
                assert isinstance(value, (int, float)) or key in NAMES, key


async def test_slow_requests_are_kept_although_nobody_sampled_them(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the threshold, here 0 s, a request has all spans that its own process can make."""
    monkeypatch.setenv("SPECSERVE_TRACE_SLOW_S", "0")
    async with running_pair() as pair:
        await traced(pair, "00")
    rounds = sink.named(telemetry.SPAN_ROUND)
    assert len(sink.named("orchestrator.generate")) == 1
    assert len(sink.named("spec_verify")) == len(rounds) > 1
    assert sink.named("target.verify") == []


async def test_rounds_and_calls_leave_no_gap(sink: Sink) -> None:
    """The parts of a request cover it: generate is its queue, then its rounds.

    Of each round its own children cover 95 % or more, however busy the machine is.
    """
    async with running_pair() as pair:
        await traced(pair, "01")
    (generate,) = sink.named("orchestrator.generate")
    parts = [*sink.named("orchestrator.queue"), *sink.named(telemetry.SPAN_ROUND)]
    assert parts[0].start_time_unix_nano == generate.start_time_unix_nano
    assert abs(parts[-1].end_time_unix_nano - generate.end_time_unix_nano) <= 1000
    for one, next_one in itertools.pairwise(parts):
        assert abs(one.end_time_unix_nano - next_one.start_time_unix_nano) <= 1000
    for span in sink.named(telemetry.SPAN_ROUND):
        assert coverage(span, children(span, sink.spans)) >= 0.95


async def test_a_failover_is_kept_and_linked_though_nobody_sampled_it(sink: Sink) -> None:
    """The call that failed has its span, with the replica that was lost; what took its place links.

    The stream's tokens are those of an undisturbed one, and the trace is connected.
    """
    async with running_pair(TARGET + ",step_ms=5") as pair:
        other = await make_target(TARGET + ",step_ms=5")
        pair.owned.append(other)
        orchestrator = pair.orchestrator
        orchestrator.update_peers(
            (pair.target.address, other.address), orchestrator.pair.drafts.links.keys()
        )
        await eventually(lambda: len(orchestrator.pair.targets.usable()) == 2, "two targets")
        metadata = (("traceparent", f"00-{TRACE_ID}-{GATEWAY_SPAN_ID}-00"),)
        call = pair.stub.Generate(make_request(max_tokens=60), metadata=metadata)
        answer = Generated()
        await pair.take(call, answer, 8)
        holder = next(s for s in (pair.target, other) if s.replica.num_sessions)
        await holder.stop()
        pair.owned.remove(holder)
        await pair.finish(call, answer)
    assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), 60)
    known = {span.span_id.hex() for span in sink.spans} | {GATEWAY_SPAN_ID}
    assert {span.parent_span_id.hex() for span in sink.spans} <= known
    calls = sink.named("spec_verify")
    failed = [span for span in calls if telemetry.ATTRIBUTE_ERROR in attributes(span)]
    assert {attributes(s)[telemetry.ATTRIBUTE_REPLICA] for s in failed} == {holder.replica_id}
    links = {link.span_id: span for span in sink.spans for link in span.links}
    assert {span.span_id for span in failed} <= links.keys()
    (move,) = sink.named("specserve.failover")
    assert attributes(move)[telemetry.ATTRIBUTE_REPLICA_LEFT] == holder.replica_id
    assert attributes(move)[telemetry.ATTRIBUTE_REPLICA] != holder.replica_id


async def test_metrics_go_out_over_otlp_as_well(sink: Sink) -> None:
    """What /metrics shows, as sums and histograms, at the latest when a service stops."""
    async with running_pair() as pair:
        answer = await traced(pair, "00")
    assert answer.record is not None
    points = sink.points
    assert points["specserve_orchestrator_num_draft_tokens"] == answer.record.num_draft_tokens
    assert points["specserve_orchestrator_round_seconds"] > 1
    assert points["specserve_device_iterations"] > 0
    assert points["specserve_request_decode_time_seconds"] == 1


async def test_unsampled_request_leaves_no_span(sink: Sink) -> None:
    """The gateway's decision not to sample holds in every service."""
    async with running_pair() as pair:
        await traced(pair, "00")
    assert sink.spans == []


@pytest.mark.parametrize("flags", ["00", "01"])
async def test_cancelled_requests_are_kept_sampled_or_not(sink: Sink, flags: str) -> None:
    """A round that its client leaves in the middle is in the trace all the same.

    Of a request that nobody sampled the orchestrator makes the spans of both services, from the
    timings in their replies; theirs are missing.
    """
    metadata = (("traceparent", f"00-{TRACE_ID}-{GATEWAY_SPAN_ID}-{flags}"),)
    async with running_pair(TARGET + ",step_ms=3") as pair:
        call = pair.stub.Generate(make_request(max_tokens=2000), metadata=metadata)
        await pair.take(call, Generated(), 5)
        call.cancel()
        await pair.until_idle()
    names = {span.span_id.hex() for span in sink.spans} | {GATEWAY_SPAN_ID}
    for span in sink.spans:
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        assert span.trace_id.hex() == TRACE_ID
        assert span.parent_span_id.hex() in names, span.name
    (generate,) = sink.named("orchestrator.generate")
    assert attributes(generate)[telemetry.ATTRIBUTE_ERROR] == "cancelled"
    assert sink.named("spec_verify")
    assert bool(sink.named("target.verify")) == (flags == "01")


async def test_the_terminal_shows_what_the_ring_remembers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`specserve trace` over gRPC: a list, then one request's rounds, whose sums are right."""
    async with running_pair() as pair:
        request = make_request(max_tokens=20)
        answer = await pair.generate(request)
        await pair.until_idle()
        flag = f"--orchestrator-address={pair.orchestrator.address}"
        codes = [
            await asyncio.to_thread(cli.main, ["trace", *words, flag])
            for words in ([], [request.request_id], ["nobody"])
        ]
        stub = requests_pb2_grpc.RecentRequestsServiceStub(pair.channel)
        found = await stub.GetRequests(requests_pb2.GetRequestsRequest(id=request.request_id))
    said = capsys.readouterr()
    (record,) = found.requests

    assert codes == [0, 0, 1]
    assert said.out.count(request.request_id) == 2
    assert "draft: forwards" in said.out
    assert "'nobody' is not remembered" in said.err
    assert answer.record is not None
    assert record.record.num_draft_tokens == answer.record.num_draft_tokens
    assert sum(one.num_draft_tokens for one in record.rounds) == answer.record.num_draft_tokens
    assert sum(one.num_emitted_tokens for one in record.rounds) == record.num_output_tokens == 20
    assert record.state == requests_pb2.REQUEST_STATE_FINISHED
    view = view_of(record)
    assert abs(view.queue_s + view.stages.total_s - view.total_s) < 1e-6


async def test_the_ring_tells_how_requests_ended() -> None:
    """Refused, cancelled, out of time: each by its name, with the rounds that it had."""
    async with running_pair(TARGET + ",step_ms=3") as pair:
        refused = make_request((1, 2, 99))
        with pytest.raises(grpc.aio.AioRpcError):
            await pair.generate(refused)
        left = make_request(max_tokens=2000)
        call = pair.stub.Generate(left)
        await pair.take(call, Generated(), 5)
        call.cancel()
        late = make_request(max_tokens=2000, timeout_s=0.2)
        with pytest.raises(grpc.aio.AioRpcError):
            await pair.generate(late)
        await pair.until_idle()
        ring = pair.orchestrator.servicer.log.ring
        ends = [ring.find(request.request_id)[0] for request in (refused, left, late)]

    assert [(end.state, end.error) for end in ends] == [
        (requests_pb2.REQUEST_STATE_FAILED, "InvalidRequest"),
        (requests_pb2.REQUEST_STATE_CANCELLED, ""),
        (requests_pb2.REQUEST_STATE_FAILED, "DeadlineExpired"),
    ]
    assert ends[0].num_rounds == 0
    assert ends[1].num_output_tokens >= 5
