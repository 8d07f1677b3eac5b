"""What `/ready` tells a client of services that do not fit together."""

from __future__ import annotations

import logging

import httpx
import pytest

from helpers.pair import TARGET, port_of, running_pair
from helpers.replica import FakeReplica, serving
from helpers.waiting import eventually
from specserve.config import EngineConfig
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.http import create_http_app
from specserve.model.tokenizer import load_tokenizer


async def test_the_reason_names_the_replica_but_no_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Addresses of the inside are the operator's: the log has them, the answer has none."""
    replica = FakeReplica()
    replica.replica_id, replica.protocol_version = "draft-of-old", 99
    async with (
        serving(replica) as address,
        running_pair(draft=None, draft_addresses=(address,), wait=False) as pair,
    ):
        drafts = pair.orchestrator.pair.drafts
        assert drafts is not None
        with caplog.at_level(logging.ERROR):
            await eventually(lambda: drafts.refusals, "the draft is refused")
        backend = GrpcBackend([pair.orchestrator.address])
        tokenizer = load_tokenizer(EngineConfig(model=TARGET))
        app = create_http_app(backend, tokenizer, GatewayConfig())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            ready = await client.get("/ready")
        await backend.close()

    assert "draft-of-old speaks protocol 99" in ready.json()["reason"]
    for inside in (pair.target.address, pair.orchestrator.address, address):
        assert f":{port_of(inside)}" not in ready.text
    assert address in caplog.text
