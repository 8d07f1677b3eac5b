"""What people write and are answered is in no log, metric, span or record, of any service."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest

from helpers.pair import TARGET, engine, running_pair
from specserve import telemetry
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.http import create_http_app
from specserve.model.tokenizer import load_tokenizer
from specserve.telemetry.tracing import Tracing

CANARY = "canary7f3a"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Keep what all services in this process trace."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "start_tracing", lambda service: tracing)
    return exporter


async def test_b250_a_canary_is_nowhere(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    """B250: at the debug level, with refusals, failures, tools' fields and a client that leaves."""
    tokenizer = load_tokenizer(engine(TARGET))
    told: list[str] = []
    with caplog.at_level(logging.DEBUG):
        async with running_pair(TARGET) as pair:
            backend = GrpcBackend([pair.orchestrator.address])
            tracing = telemetry.start_tracing("specserve-gateway")
            app = create_http_app(backend, tokenizer, GatewayConfig(), tracing=tracing)
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=30
            ) as client:
                for body in _bodies():
                    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                    answer = await client.post(path, json=body)
                    if answer.status_code == 200 and not body.get("stream"):
                        choice = answer.json()["choices"][0]
                        told.append(choice.get("text") or choice["message"]["content"])
                await client.post("/tokenize", json={"prompt": CANARY})
                metrics = (await client.get("/metrics")).text
                remembered = (await client.get("/v1/specserve/requests?limit=200")).text
            metrics += generate_latest(pair.orchestrator.registry).decode()
            await backend.close()
    seen = [
        caplog.text,
        metrics,
        remembered,
        *(span.to_json() for span in spans.get_finished_spans()),
    ]

    assert len(spans.get_finished_spans()) > 10
    assert len(told) >= 3
    assert len(json.loads(remembered)["requests"]) >= 4
    prompt = tokenizer.encode(CANARY, add_special_tokens=False)
    for secret in (CANARY, str(prompt)[1:-1], " ".join(map(str, prompt)), *told):
        assert len(secret) >= len(CANARY)
        assert not any(secret in text for text in seen), secret


def _bodies() -> list[dict[str, Any]]:
    text = {"prompt": CANARY, "max_tokens": 30, "ignore_eos": True, "seed": 1}
    chat = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 30, "seed": 1}
    return [
        text,
        {**text, "temperature": 0, "logprobs": 3, "speculation_metrics": "detailed"},
        {**chat, "ignore_eos": True},
        {**chat, "stream": True},
        # Each is refused, at another place.
        {**text, "model": CANARY},
        {**text, CANARY: 1},
        {**text, "temperature": CANARY},
        {**text, "stop": [CANARY] * 17},
        {**text, "logit_bias": {CANARY: 1}},
        {**text, "guided_regex": f"({CANARY}"},
        {**text, "guided_json": {"$ref": CANARY}},
        {**text, "prompt": CANARY * 500, "min_tokens": 10**6},
    ]
