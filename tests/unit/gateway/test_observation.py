"""Counters, probes and traces tell what happened, and never what was said."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from prometheus_client.parser import text_string_to_metric_families

from specserve import errors
from specserve.gateway.config import GatewayConfig
from specserve.gateway.http import create_http_app
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.pair import PairWatch
from specserve.rpc.v1 import common_pb2, generation_pb2
from specserve.rpc.v1.generation_pb2 import GenerateRequest, GetStatusResponse
from specserve.telemetry import Tracing
from unit.gateway.fakes import (
    MODEL,
    ByteTokenizer,
    Exchange,
    FakeBackend,
    Step,
    block,
    make_app,
    make_client,
    pair,
)

COMPLETIONS = "/v1/completions"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


class Traced:
    """An application whose spans are kept."""

    def __init__(self, backend: FakeBackend, ratio: float = 1.0, slow_s: float = 1e9) -> None:
        self.exporter = InMemorySpanExporter()
        self.metrics = GatewayMetrics()
        tracing = Tracing(SimpleSpanProcessor(self.exporter), ratio, slow_s)
        self.app = make_app(backend, self.metrics, tracing)

    @property
    def spans(self) -> Any:
        """Return the requests' own spans."""
        return [span for span in self.all_spans if span.kind is SpanKind.SERVER]

    @property
    def all_spans(self) -> Any:
        """Return every span."""
        return self.exporter.get_finished_spans()


def sample(metrics: GatewayMetrics, name: str, **labels: str) -> float | None:
    """Read one value."""
    return metrics.registry.get_sample_value(name, labels)


async def test_counters_follow_what_was_emitted() -> None:
    """Names that dashboards know; per choice, after trimming."""
    backend = FakeBackend()
    metrics = GatewayMetrics()
    async with make_client(backend, make_app(backend, metrics)) as client:
        await client.post(COMPLETIONS, json={"prompt": "hi", "n": 2})
        scraped = (await client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(scraped)}

    assert sample(metrics, "specserve_request_success_total", finished_reason="stop") == 2
    assert sample(metrics, "specserve_prompt_tokens_total") == 2
    assert sample(metrics, "specserve_generation_tokens_total") == 10
    assert sample(metrics, "specserve_spec_decode_num_drafts_total") == 4
    assert sample(metrics, "specserve_spec_decode_num_draft_tokens_total") == 12
    assert sample(metrics, "specserve_spec_decode_num_accepted_tokens_total") == 6
    per_pos = "specserve_spec_decode_num_accepted_tokens_per_pos_total"
    assert [sample(metrics, per_pos, position=str(i)) for i in range(3)] == [4, 2, 0]
    assert sample(metrics, "specserve_spec_decode_num_recovered_tokens_total") == 2
    assert sample(metrics, "specserve_spec_decode_num_bonus_tokens_total") == 2
    assert sample(metrics, "specserve_time_to_first_token_seconds_count") == 2
    assert sample(metrics, "specserve_inter_token_latency_seconds_count") == 4
    assert sample(metrics, "specserve_request_time_per_output_token_seconds_count") == 2
    assert sample(metrics, "specserve_e2e_request_latency_seconds_count") == 2
    assert sample(metrics, "specserve_num_requests_running") == 0
    assert "specserve_spec_decode_num_drafts" in families


async def test_running_choices_are_counted_down_on_every_way_out() -> None:
    """B074, B079: after a disconnect, a failure and an end the gauge is at zero."""
    metrics = GatewayMetrics()
    backend = FakeBackend(lambda _: [block(b"x"), asyncio.Event()])
    app = make_app(backend, metrics)
    exchange = Exchange(app, COMPLETIONS, {"prompt": "hi", "n": 4, "stream": True})
    exchange.read_all()
    task = exchange.start()
    await backend.until(lambda: len(backend.open) == 4)
    running = sample(metrics, "specserve_num_requests_running")
    exchange.disconnect()
    await task
    backend.script = lambda _: [errors.PeerUnavailable("target", "gone")]
    async with make_client(backend, app) as client:
        await client.post(COMPLETIONS, json={"prompt": "hi", "n": 2})
        await client.post(COMPLETIONS, json={"prompt": ""})

    assert running == 4
    assert sample(metrics, "specserve_num_requests_running") == 0
    failures = "specserve_request_failure_total"
    assert sample(metrics, failures, error="cancelled") == 1
    assert sample(metrics, failures, error="PeerUnavailable") == 1
    assert sample(metrics, failures, error="InvalidRequest") == 1


async def test_replica_gauges_are_as_fresh_as_the_scrape() -> None:
    """A replica that is gone leaves no line behind; KV in use is a share."""
    load = common_pb2.Load(num_free_blocks=25, num_blocks=100, num_sessions=3)
    replica = generation_pb2.ReplicaStatus(role="target", replica_id="t1", load=load)
    backend = FakeBackend()
    backend.statuses = [GetStatusResponse(num_waiting=2, replicas=[replica])]
    metrics = GatewayMetrics()
    async with make_client(backend, make_app(backend, metrics)) as client:
        await client.get("/metrics")
        labels = {"role": "target", "replica": "t1"}
        assert sample(metrics, "specserve_kv_cache_usage_perc", **labels) == 0.75
        assert sample(metrics, "specserve_num_sessions", **labels) == 3
        assert sample(metrics, "specserve_num_requests_waiting") == 2
        backend.statuses = []
        scraped = (await client.get("/metrics")).text

    assert "t1" not in scraped


async def test_metrics_answer_while_nobody_else_does() -> None:
    """A lost orchestrator costs its gauges, not the scrape."""
    backend = FakeBackend()

    async def lost() -> list[GetStatusResponse]:
        raise errors.PeerUnavailable("orchestrator", "none")

    backend.get_status = lost
    async with make_client(backend) as client:
        answer = await client.get("/metrics")

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_alive_and_ready_are_two_things() -> None:
    """/health asks nobody; /ready tells why not; without a target requests are told to come back.

    B095, B148: a target whose draft is refused or missing serves all the same, target-only.
    """
    backend = FakeBackend()
    backend.pair = pair(ready=False, reason="vocabularies differ, first at token id 7")
    async with make_client(backend) as client:
        health, ready = await client.get("/health"), await client.get("/ready")
        target_only = await client.post(COMPLETIONS, json={"prompt": "x"})
        backend.pair_error = errors.PeerUnavailable("orchestrator", "none is known")
        alone = await client.get("/ready")
        health_alone = await client.get("/health")
        backend.pair_error = None
        backend.pair = pair(reason="draft lost", speculation_enabled=False)
        degraded = await client.get("/ready")
        served = await client.post(COMPLETIONS, json={"prompt": "x"})
    backend.pair = pair(ready=False, reason="no target replica is loaded")
    backend.pair.ClearField("target")
    async with make_client(backend) as client:
        asked = await client.post(COMPLETIONS, json={"prompt": "x"})

    assert (health.status_code, health_alone.status_code) == (200, 200)
    assert health.json()["service"] == "specserve"  # by this `specserve doctor` knows its own kind
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert "token id 7" in ready.json()["reason"]
    assert target_only.status_code == 200
    assert asked.status_code == 503
    assert "not ready yet" in asked.json()["error"]["message"]
    assert alone.status_code == 503
    assert "cannot be reached" in alone.json()["reason"]
    assert degraded.status_code == 200
    assert degraded.json()["reason"] == "draft lost"
    assert degraded.json()["speculation_enabled"] is False
    assert served.status_code == 200


async def test_a_pair_that_is_not_ready_is_logged_once_however_often_it_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Polls tell a change and no more; a request that fails is told with its id, and why."""
    backend = FakeBackend()
    lost = errors.PeerUnavailable("orchestrator", "ipv4:10.0.0.7:7003: refused")
    async with make_client(backend, pair_refresh_s=0) as client:

        async def poll() -> None:
            for _ in range(5):
                await client.get("/ready")
                await client.get("/v1/models")

        backend.pair_error = lost
        await poll()
        asked = await client.post(COMPLETIONS, json={"prompt": "x"})
        backend.pair_error = None
        await poll()
        backend.pair = pair(ready=False, reason="no draft replica is loaded")
        await poll()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    request_id = asked.headers["x-request-id"]

    assert lines == [
        f"not ready: {lost}",
        f"{request_id} failed: PeerUnavailable: {lost}",
        f"ready again: {MODEL}",
        "not ready: no draft replica is loaded",
    ]


async def test_the_pair_is_asked_for_once_in_a_while() -> None:
    """Many requests cost one question; a lost orchestrator does not unlearn the pair."""
    backend = FakeBackend()
    watch = PairWatch(backend, None, refresh_s=1000)
    await asyncio.gather(*(watch.ready() for _ in range(20)))
    eager = PairWatch(backend, None, refresh_s=0)
    await eager.ready()
    backend.pair_error = errors.PeerUnavailable("orchestrator", "restarting")

    assert (await eager.ready()).model == MODEL
    assert backend.num_pair_calls == 3


async def test_a_request_is_one_span_in_the_caller_s_trace() -> None:
    """B214, B217: the context comes from the header and goes on explicitly; no text in it."""
    backend = FakeBackend()
    traced = Traced(backend)
    async with make_client(backend, traced.app) as client:
        body = {"prompt": "canary7f3a", "temperature": 0.5, "max_tokens": 9}
        await client.post(COMPLETIONS, json=body, headers={"traceparent": PARENT})
    (span,) = traced.spans
    context = span.get_span_context()
    parts = [part for part in traced.all_spans if part is not span]

    assert f"{context.trace_id:032x}" == TRACE_ID
    assert backend.traceparents == [f"00-{TRACE_ID}-{context.span_id:016x}-01"]
    assert span.name == f"text_completion {MODEL}"
    times = {key: value for key, value in span.attributes.items() if key.endswith("_s")}
    assert {key for key, value in times.items() if value >= 0} == {
        "specserve.queue_s",
        "specserve.gateway.tokenise_s",
        "specserve.gateway.detokenise_s",
    }
    assert {key: span.attributes[key] for key in span.attributes if key not in times} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specserve",
        "gen_ai.response.model": MODEL,
        "gen_ai.request.model": MODEL,
        "gen_ai.response.id": span.attributes["gen_ai.response.id"],
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert "canary7f3a" not in "".join(one.to_json() for one in traced.all_spans)
    assert [part.name for part in parts] == ["gateway.queue", "gateway.tokenise", "gateway.answer"]
    assert {part.parent.span_id for part in parts} == {context.span_id}
    assert parts[0].start_time == span.start_time
    assert parts[0].end_time == parts[1].start_time
    assert parts[2].end_time == span.end_time


@pytest.mark.parametrize("header", ["", "nonsense", "00-zz-zz-01", "é", "00-" + "0" * 32 + "-1-01"])
async def test_a_broken_traceparent_starts_a_trace_of_its_own(header: str) -> None:
    """And never a 500."""
    backend = FakeBackend()
    traced = Traced(backend)
    headers = {b"traceparent": header.encode("latin-1")}
    async with make_client(backend, traced.app) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
    async with make_client(FakeBackend()) as client:
        untraced = await client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)

    assert answer.status_code == untraced.status_code == 200
    assert backend.traceparents[0].startswith("00-")


async def test_leaving_in_mid_stream_ends_the_span_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B215, B218: no context token is undone in the wrong task; the span says cancelled."""

    def script(request: GenerateRequest) -> Sequence[Step]:
        return [block(b"x"), asyncio.Event()]

    backend = FakeBackend(script)
    traced = Traced(backend)

    async def read_one_event_and_leave() -> None:
        exchange = Exchange(traced.app, COMPLETIONS, {"prompt": "hi", "stream": True})
        exchange.read_all()
        task = exchange.start()
        await exchange.until(lambda: b"x" in exchange.body)
        exchange.disconnect()
        await task

    for _ in range(20):
        await read_one_event_and_leave()
    gc.collect()

    assert len(traced.spans) == 20
    assert {span.attributes["error.type"] for span in traced.spans} == {"cancelled"}
    assert "context" not in caplog.text.lower()
    assert caplog.records == []


async def test_a_failed_stream_ends_its_span_with_the_error_s_class() -> None:
    """The class only: a message may quote what the client sent."""
    backend = FakeBackend(lambda _: [block(b"x"), errors.PeerUnavailable("target", "gone")])
    traced = Traced(backend)
    async with make_client(backend, traced.app) as client:
        await client.post(COMPLETIONS, json={"prompt": "hi", "stream": True})
        await client.post(COMPLETIONS, json={"prompt": ""})

    assert [span.attributes["error.type"] for span in traced.spans] == [
        "PeerUnavailable",
        "InvalidRequest",
    ]
    assert all(not span.status.is_ok for span in traced.spans)


async def test_the_openapi_document_has_both_bodies() -> None:
    """Bodies are read by hand, but described like any other; all references lead somewhere."""
    async with make_client(FakeBackend()) as client:
        document = (await client.get("/openapi.json")).json()
        again = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values())) if value else own
        if isinstance(value, list):
            return set().union(*map(references, value))
        return set()

    assert document == again
    assert {"CompletionRequest", "ChatRequest", "Completion", "ChatCompletion"} <= set(schemas)
    assert {ref.removeprefix("#/components/schemas/") for ref in references(document)} <= set(
        schemas
    )
    assert "top_k" in schemas["ChatRequest"]["properties"]


async def test_a_long_prompt_is_tokenised_off_the_event_loop() -> None:
    """B253, B254: the loop answers /health while a tokenizer is busy."""
    busy, go_on = threading.Event(), threading.Event()
    threads: list[int] = []

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            threads.append(threading.get_ident())
            busy.set()
            assert go_on.wait(5)
            return super().encode(text, add_special_tokens)

    backend = FakeBackend()
    config = GatewayConfig(tokenize_in_thread_chars=10)
    app = create_http_app(backend, SlowTokenizer(), config)
    async with make_client(backend, app) as client:
        asked = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "x" * 20}))
        assert await asyncio.to_thread(busy.wait, 5)
        health = await client.get("/health")
        go_on.set()
        answer = await asked

    assert health.status_code == answer.status_code == 200
    assert threads != []
    assert threading.get_ident() not in threads
