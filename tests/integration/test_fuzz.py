"""Thousands of requests, right and wrong, against a running pair: nothing breaks, nothing is left.

500 of them in CI; `make fuzz` sends 10,000. `SPECSERVE_FUZZ_REQUESTS` and `SPECSERVE_FUZZ_SEED`
say otherwise.
"""

from __future__ import annotations

import asyncio
import os
import re

import httpx
import pytest

from helpers.fuzzing import Judge, problems, send_all, share_answered, table
from helpers.gateway import running_gateway
from helpers.pair import running_pair
from specserve.gateway.config import GatewayConfig
from support.fuzz_bodies import VOCAB_SIZE, fuzz_requests

NUM_REQUESTS = int(os.environ.get("SPECSERVE_FUZZ_REQUESTS", "500"))
SEED = int(os.environ.get("SPECSERVE_FUZZ_SEED", "1"))
MIN_SHARE = 0.3
"""Of requests that are answered with some tokens: a run of refusals would prove little."""

TARGET = f"toy:vocab_size={VOCAB_SIZE},seed=7,order=8"
DRAFT = f"{TARGET},noise=0.7,noise_seed=1"
LIMITS = GatewayConfig(
    port=0, max_n=3, max_prompts=4, max_choices=6, default_chat_tokens=12, max_body_bytes=65_536
)
MAX_MODEL_LEN = 160
"""Short, so that prompts and texts meet the context's end too."""
NUM_BLOCKS = 240
"""Room for some 24 sequences of that length: with 16 requests of up to six choices at once there is
sometimes none."""


@pytest.mark.slow
async def test_no_request_breaks_anything(capsys: pytest.CaptureFixture[str]) -> None:
    """B226, B233, B259: 200, a 400 with the field, or 503 with Retry-After; then all is free."""
    fields: dict[str, object] = {
        "max_model_len": MAX_MODEL_LEN,
        "num_kv_blocks": NUM_BLOCKS,
        "block_size": 16,
    }
    async with (
        running_pair(TARGET, DRAFT, target_fields=fields, draft_fields=fields) as pair,
        running_gateway(pair, TARGET, LIMITS) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        document = (await client.get("/openapi.json")).json()
        requests = await asyncio.to_thread(fuzz_requests, document, NUM_REQUESTS, SEED)
        outcomes = await send_all(url, Judge(document), requests)
        with capsys.disabled():
            print(f"\nfuzz: seed {SEED}\n{table(outcomes)}")
        assert not problems(outcomes), problems(outcomes)
        assert len(outcomes) == NUM_REQUESTS
        # Gauges back to zero: no block, no session, no lease, no running request.
        await pair.until_idle(within_s=60)
        metrics = (await client.get("/metrics")).text
        running = re.findall(r"^\w*num_requests_(?:running|waiting)(?:{.*})? (.*)$", metrics, re.M)
        assert running
        assert {float(value) for value in running} == {0.0}
        answer = await client.post("/v1/completions", json={"prompt": "x", "temperature": 0})
        assert answer.status_code == 200
    assert share_answered(outcomes) >= MIN_SHARE
