"""A choice that outlives its orchestrator: what is counted of it is what was streamed."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from helpers.pair import DRAFT, make_request, running_pair
from helpers.proxy import Proxy, proxy_to
from specserve.config import EngineConfig, SpeculativeMethod
from specserve.gateway.blocks import unpack_origins, unpack_rounds
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.http import create_http_app
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.rounds import record_of
from specserve.model.tokenizer import load_tokenizer
from specserve.rpc.v1.generation_pb2 import GenerateRequest, GenerateResponse

SLOW_TARGET = "toy:vocab_size=48,seed=7,step_ms=2"
MAX_TOKENS = 120
ORIGINS = ("accepted", "recovered", "bonus", "plain")

pytestmark = pytest.mark.slow


class CutWhileStreaming(GrpcBackend):
    """Loses its orchestrator each time a choice has got so many more tokens."""

    def __init__(self, address: str, proxy: Proxy, every: int) -> None:
        super().__init__([address])
        self._proxy = proxy
        self._every = every
        self.num_cuts = 0

    async def generate(
        self, request: GenerateRequest, traceparent: str = ""
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Decode, and cut."""
        since = 0
        async for response in super().generate(request, traceparent):
            yield response
            since += len(response.token_ids) // 4
            if since >= self._every and not response.finish_reason:
                since = 0
                self.num_cuts += 1
                self._proxy.cut()


@pytest.mark.parametrize("rule", ["greedy", "coupled", "standard"])
@pytest.mark.parametrize(("k", "max_tokens"), [(4, 64), (3, 33), (1, 80), (0, 12)])
@pytest.mark.parametrize("method", ["draft_model", "ngram", "suffix", "cascade"])
async def test_what_is_streamed_tells_the_orchestrators_own_record_for_every_proposer(
    method: SpeculativeMethod, rule: str, k: int, max_tokens: int
) -> None:
    """Every number that a lost record is rebuilt from the stream for, draft tokens included."""
    request = make_request([5, 6, 7] * 4, rule=rule, k=k, max_tokens=max_tokens)
    draft = DRAFT if method in ("draft_model", "cascade") else None
    async with running_pair(draft=draft, speculative={"method": method}) as pair:
        responses = [response async for response in pair.blocks(request)]
    record = responses[-1].record
    rebuilt = record_of(
        [origin for response in responses for origin in unpack_origins(response.origins)],
        [told for response in responses for told in unpack_rounds(response)],
    )

    for own_affair in ("draft_s", "verify_s", "num_late_proposals", "cached_prompt_tokens"):
        record.ClearField(own_affair)
    record.ClearField("num_speculative_tokens")
    assert rebuilt == record
    assert record.num_spec_steps > 0 or k == 0


async def test_the_record_of_a_carried_over_choice_covers_all_its_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lost in mid-stream, twice and more: usage, figures and counters all tell the same tokens."""
    metrics = GatewayMetrics()
    body = {
        "prompt": "hello",
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": MAX_TOKENS,
        "speculation_metrics": "detailed",
    }
    async with (
        running_pair(SLOW_TARGET, DRAFT) as pair,
        proxy_to(pair.orchestrator.address) as (proxy, address),
    ):
        tokenizer = load_tokenizer(EngineConfig(model=SLOW_TARGET))
        cut = CutWhileStreaming(address, proxy, every=30)
        undisturbed = GrpcBackend([pair.orchestrator.address])
        with caplog.at_level(logging.WARNING):
            disturbed = await ask(create_http_app(cut, tokenizer, GatewayConfig(), metrics), body)
        whole = await ask(create_http_app(undisturbed, tokenizer, GatewayConfig()), body)
        await cut.close()
        await undisturbed.close()

    assert cut.num_cuts >= 2
    assert "asking again" in caplog.text
    assert disturbed["choices"][0]["text"] == whole["choices"][0]["text"]
    assert disturbed["usage"]["completion_tokens"] == MAX_TOKENS
    figures = disturbed["metrics"]["speculative_decoding"]
    assert origins_in(figures) == {
        origin: disturbed["choices"][0]["token_origins"].count(origin) for origin in ORIGINS
    }
    assert sum(origins_in(figures).values()) == MAX_TOKENS
    assert sum(figures["per_step_drafted"][0]) == figures["num_draft_tokens"]
    assert sum(figures["per_step_accepted"][0]) == figures["num_accepted_draft_tokens"]
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
    assert counted(metrics) == origins_in(figures)
    assert metrics.registry.get_sample_value("specserve_generation_tokens_total") == MAX_TOKENS


async def ask(app: Any, body: dict[str, Any]) -> Any:
    """Return a whole answer."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def origins_in(figures: dict[str, Any]) -> dict[str, int]:
    """Return the figures' tokens by origin."""
    return {
        "accepted": figures["num_accepted_draft_tokens"],
        "recovered": figures["num_recovered_tokens"],
        "bonus": figures["num_bonus_tokens"],
        "plain": figures["num_plain_tokens"],
    }


def counted(metrics: GatewayMetrics) -> dict[str, float | None]:
    """Return the gateway's counters by origin."""
    return {
        origin: metrics.registry.get_sample_value(
            f"specserve_spec_decode_num_{origin}_tokens_total"
        )
        for origin in ORIGINS
    }
