"""Counters over real gRPC: what is exported, and that it adds up to what clients were told."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from helpers.pair import DRAFT, TARGET, Pair, running_pair
from specserve.config import EngineConfig
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.http import create_http_app
from specserve.gateway.metrics import GatewayMetrics
from specserve.model.tokenizer import load_tokenizer
from specserve.rpc.metrics_endpoint import LoadCollector
from specserve.rpc.replica_service import ReplicaService
from unit.gateway.fakes import Exchange, events_of

ROOT = Path(__file__).parents[2]
COMPLETIONS = "/v1/completions"
NAN_TOKEN = 0
"""EOS, which no text comes to by itself: a row after it is NaN."""
FAILING_TARGET = f"{TARGET},eos_bias=-50,nan_token={NAN_TOKEN}"
FAILS_UNDER_WAY = {
    "prompt": "ab",
    "temperature": 0,
    "ignore_eos": True,
    "min_tokens": 4,
    "logit_bias": {NAN_TOKEN: 100},
    "stream": True,
    "return_token_ids": True,
}

pytestmark = pytest.mark.slow


class Measured:
    """A gateway in this process over a running pair."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.metrics = GatewayMetrics()
        self.backend = GrpcBackend([pair.orchestrator.address])
        tokenizer = load_tokenizer(EngineConfig(model=TARGET))
        config = GatewayConfig(tenant_header="X-Tenant")
        self.app = create_http_app(self.backend, tokenizer, config, self.metrics)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://gateway", timeout=60
        )

    async def texts(self) -> list[str]:
        """Scrape everybody."""
        registries = [self.pair.orchestrator.registry]
        services: list[tuple[str, ReplicaService | None]] = [
            ("target", self.pair.target),
            ("draft", self.pair.draft),
        ]
        for role, service in services:
            assert service is not None
            registry = CollectorRegistry()
            registry.register(LoadCollector(role, lambda s=service: s.replica.device.load))
            registries.append(registry)
        gateway = (await self.client.get("/metrics")).text
        return [gateway, *(generate_latest(registry).decode() for registry in registries)]

    async def samples(self) -> dict[str, float]:
        """Sum every sample over its labels: {name: value}."""
        sums: dict[str, float] = defaultdict(float)
        for text in await self.texts():
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    sums[sample.name] += sample.value
        return sums

    async def failures(self) -> dict[str, float]:
        """Return how many requests failed, by the error."""
        text = (await self.client.get("/metrics")).text
        return {
            sample.labels["error"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "specserve_request_failure_total"
        }


def body(number: int) -> dict[str, Any]:
    """Make one of many kinds of requests."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": number},
        {"temperature": 0.7, "n": 2},
        {"num_speculative_tokens": 0},
        {"speculative_method": "ngram", "temperature": 0},
        {"prompt": ["ab", "cde"], "temperature": 0},
    ]
    fields = {"prompt": "ab", "max_tokens": 3 + number % 6, "ignore_eos": True}
    return fields | kinds[number % len(kinds)]


class Clients:
    """What clients sent, and what they were told."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._slots = asyncio.Semaphore(32)
        self.num_prompt_tokens = 0
        self.num_tokens = 0

    async def ask(self, number: int) -> None:
        """Ask one thing; every ninth is refused."""
        wrong = {"max_tokens": -1} if number % 9 == 0 else {}
        answer = await self._post(number, body(number) | wrong)
        assert answer.status_code == (400 if wrong else 200), answer.text
        usage = answer.json().get("usage") or {}
        self.num_prompt_tokens += usage.get("prompt_tokens", 0)
        self.num_tokens += usage.get("completion_tokens", 0)

    async def fail_at_once(self, number: int) -> None:
        """Ask what the model has no answer to: its first row is NaN."""
        answer = await self._post(number, {"prompt": [5, 6, NAN_TOKEN]})
        assert answer.json()["error"]["code"] == "non_finite_logits"
        self.num_prompt_tokens += 3

    async def fail_under_way(self, number: int) -> None:
        """Read a stream whose model fails after some tokens, which count."""
        answer = await self._post(number, FAILS_UNDER_WAY)
        *tokens, error = events_of(answer.text)
        assert error["error"]["code"] == "non_finite_logits"
        self.num_prompt_tokens += 2
        received = sum(len(chunk["choices"][0]["token_ids"]) for chunk in tokens)
        assert received > 0
        self.num_tokens += received

    async def leave(self, number: int) -> None:
        """Go away once something has come."""
        endless = body(number) | {"max_tokens": 400, "stream": True}
        exchange = Exchange(self._measured.app, COMPLETIONS, endless)
        exchange.read_all()
        task = exchange.start()
        await exchange.until(lambda: b"data: " in exchange.body)
        exchange.disconnect()
        await task

    async def _post(self, number: int, fields: dict[str, Any]) -> httpx.Response:
        headers = {"X-Tenant": f"t{number % 3}"}
        async with self._slots:
            return await self._measured.client.post(COMPLETIONS, json=fields, headers=headers)


async def test_totals_are_what_clients_were_told() -> None:
    """B134: 500 mixed requests, some refused, some failing on the server, some given up.

    Usage of all answers, the gateway's counters and the orchestrator's are the same sums; every
    emitted token has one origin, in a stream that breaks off too. Of a request whose client left,
    the gateway counts what it received, and its parts add up all the same.
    """
    async with running_pair(FAILING_TARGET, DRAFT + ",eos_bias=-50") as pair:
        measured = Measured(pair)
        clients = Clients(measured)
        await asyncio.gather(
            *(clients.ask(number) for number in range(400)),
            *(clients.fail_at_once(number) for number in range(25)),
            *(clients.fail_under_way(number) for number in range(25)),
        )
        await pair.until_idle()
        told = await measured.samples()
        await asyncio.gather(*(clients.leave(number) for number in range(50)))
        await pair.until_idle()
        after = await measured.samples()
        errors = await measured.failures()
        await measured.client.aclose()
        await measured.backend.close()

    completion = clients.num_tokens
    assert told["specserve_generation_tokens_total"] == completion > 1000
    assert told["specserve_prompt_tokens_total"] == clients.num_prompt_tokens
    assert told["specserve_tenant_generation_tokens_total"] == completion
    assert told["specserve_tenant_prompt_tokens_total"] == clients.num_prompt_tokens
    assert told["specserve_request_generation_tokens_sum"] == completion
    assert told["specserve_request_failure_total"] == 45 + 50
    for prefix in ("specserve_spec_decode_num", "specserve_orchestrator_num"):
        origins = ("accepted", "recovered", "bonus", "plain")
        assert sum(told[f"{prefix}_{origin}_tokens_total"] for origin in origins) == completion
    assert (
        told["specserve_orchestrator_revision_num_draft_tokens_total"]
        == (told["specserve_orchestrator_num_draft_tokens_total"])
    )
    rejected = told["specserve_orchestrator_num_rejections_per_pos_total"]
    assert 0 < rejected <= told["specserve_orchestrator_num_drafts_total"]
    stages = told["specserve_orchestrator_round_stage_seconds_total"]
    assert abs(stages / told["specserve_orchestrator_round_seconds_sum"] - 1) < 1e-6
    assert errors == {"InvalidRequest": 45, "NonFiniteLogits": 50, "cancelled": 50}
    emitted = after["specserve_generation_tokens_total"]
    assert emitted > completion
    parts = (f"specserve_spec_decode_num_{o}_tokens_total" for o in origins)
    assert sum(after[name] for name in parts) == emitted
    assert after["specserve_tenant_generation_tokens_total"] == emitted
    assert sum(after[f"specserve_orchestrator_num_{o}_tokens_total"] for o in origins) >= emitted


async def test_every_metric_that_is_asked_for_is_exported() -> None:
    """After 20 requests a pair exports all that dashboards and alerts name.

    B137: and no `_created` gauge, which a sum over names would add.
    """
    async with running_pair() as pair:
        measured = Measured(pair)
        for number in range(20):
            answer = await measured.client.post(COMPLETIONS, json=body(number))
            assert answer.status_code == 200
        await measured.client.post(COMPLETIONS, json={"prompt": ""})
        exported: set[str] = set()
        for text in await measured.texts():
            for family in text_string_to_metric_families(text):
                suffix = {"counter": "_total"}.get(family.type, "")
                exported |= {sample.name for sample in family.samples} | {family.name + suffix}
        exemplars = await measured.client.get(
            "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        await measured.client.aclose()
        await measured.backend.close()
    rules = yaml.safe_load((ROOT / "deploy/observability/rules.yaml").read_text())
    board = json.loads((ROOT / "deploy/compose/grafana/dashboards/specserve.json").read_text())
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    asked += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = set(re.findall(r"\bspecserve_\w+", " ".join(asked)))

    assert len(names) > 25
    assert names <= exported
    assert not [name for name in exported if name.endswith("_created")]
    assert exemplars.text.endswith("# EOF\n")
