"""Every token says where it came from: origin, round, position, replicas, revision, p and q."""

from __future__ import annotations

import httpx
import pytest

from helpers.pair import TARGET, running_pair
from specserve.config import EngineConfig
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.http import create_http_app
from specserve.model.tokenizer import load_tokenizer


@pytest.mark.parametrize("seed", [None, 5])
async def test_every_token_tells_its_origin(seed: int | None) -> None:
    """Rounds follow one another, positions count from 0, and each decision fits its numbers.

    With the standard rule p and q are there; a recovered token has those of the rejected draft
    token. Coupled compares tokens: p is 1 or 0, and there is no q.
    """
    async with running_pair() as pair:
        backend = GrpcBackend([pair.orchestrator.address])
        tokenizer = load_tokenizer(EngineConfig(model=TARGET))
        app = create_http_app(backend, tokenizer, GatewayConfig())
        transport = httpx.ASGITransport(app)
        body = {
            "prompt": "ab",
            "max_tokens": 60,
            "temperature": 1,
            "seed": seed,
            "ignore_eos": True,
            "speculation_metrics": "detailed",
        }
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            detailed = (await client.post("/v1/completions", json=body)).json()
            plain = (
                await client.post("/v1/completions", json=body | {"speculation_metrics": "summary"})
            ).json()
        await backend.close()
        assert pair.draft is not None
        draft_id, target_id = pair.draft.replica_id, pair.target.replica_id
    (choice,) = detailed["choices"]
    tokens = choice["token_provenance"]

    assert "token_provenance" not in plain["choices"][0]
    assert [token["origin"] for token in tokens] == choice["token_origins"]
    assert len(tokens) == detailed["usage"]["completion_tokens"] == 60
    assert {token["target_replica"] for token in tokens} == {target_id}
    place = (1, -1)
    for token in tokens:
        here = (token["round"], token["position"])
        assert here == (place[0], place[1] + 1) or (here[0] > place[0] and here[1] == 0)
        place = here
        is_drafted = token["origin"] in ("accepted", "recovered", "bonus")
        assert token["proposer"] == ("draft_model" if is_drafted else None)
        assert token["draft_replica"] == (draft_id if is_drafted else None)
        assert bool(token["draft_revision"]) == is_drafted
        if token["origin"] in ("bonus", "plain"):
            assert token["p"] is token["q"] is None
        elif seed is None:
            assert 0 < token["q"] <= 1
            assert 0 <= token["p"] <= 1
            assert token["origin"] == "accepted" or token["p"] < token["q"]
        else:
            assert (token["p"], token["q"]) == (float(token["origin"] == "accepted"), None)
    assert {"accepted", "recovered"} <= {token["origin"] for token in tokens}
