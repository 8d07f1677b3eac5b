"""One tenant learns nothing of another's prompts: over HTTP, with keys, down to both KV caches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.pair import TARGET, engine, running_pair
from specserve.draft.servicer import DraftWire
from specserve.gateway.api_keys import KeyRing, make_key
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.http import create_http_app
from specserve.grammar.compiler import GrammarCompiler
from specserve.model.tokenizer import load_tokenizer

PROMPT = list(range(1, 41))
"""Two whole blocks of 16, and a rest."""


class Client:
    """Asks as one of several tenants."""

    def __init__(self, client: httpx.AsyncClient, keys: dict[str, str]) -> None:
        self._client = client
        self._keys = keys

    async def ask(self, tenant: str, **fields: Any) -> Any:
        answer = await self._client.post(
            "/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields},
            headers={"authorization": f"Bearer {self._keys[tenant]}"},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[Client]:
    """Serve the toy pair behind a gateway with a key for each of two tenants."""
    made = {name: make_key(name) for name in ("red", "blue")}
    path = folder / "keys"
    path.write_text(KeyRing(key for _, key in made.values()).text())
    async with running_pair(**options) as pair:
        backend = GrpcBackend([pair.orchestrator.address])
        app = create_http_app(
            backend, load_tokenizer(engine(TARGET)), GatewayConfig(api_key_file=str(path))
        )
        try:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://gateway"
            ) as client:
                yield Client(client, {name: text for name, (text, _) in made.items()})
        finally:
            await backend.close()


def cached_tokens(answer: Any) -> int:
    """Return what the usage tells of the prefix cache; a shorter wait tells it too."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_another_tenant_s_prefix_gives_no_cache_hit(tmp_path: Path) -> None:
    """On the target, whose hits the usage tells: fewer tokens to read also show as time."""
    hits: list[tuple[str, int]] = []
    texts: set[str] = set()
    async with served(tmp_path) as client:
        for tenant in ("red", "blue", "red", "blue"):
            answer = await client.ask(tenant)
            texts.add(answer["choices"][0]["text"])
            hits.append((tenant, cached_tokens(answer)))

    assert hits == [("red", 0), ("blue", 0), ("red", 32), ("blue", 32)]
    assert len(texts) == 1


async def test_another_tenant_s_prefix_gives_no_hit_on_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies: list[int] = []
    pack = DraftWire.pack_reply

    def watched(self: DraftWire, reply: Any, call_id: int) -> Any:
        replies.append(reply.prefix_cached_tokens)
        return pack(self, reply, call_id)

    monkeypatch.setattr(DraftWire, "pack_reply", watched)
    found: list[list[int]] = []
    async with served(tmp_path) as client:
        for number in range(20):
            found = []
            for tenant in ("red", "blue", "red"):
                replies.clear()
                await client.ask(tenant, prompt=[number + 1, *PROMPT], max_tokens=40)
                found.append([*replies])
            if all(found):
                break  # else a request was over before its draft had read the prompt

    assert all(found)
    assert [max(hits) for hits in found] == [0, 0, 32]


async def test_another_tenant_s_outputs_are_no_guess(tmp_path: Path) -> None:
    """Suffix decoding's past outputs: what speculation saves does not tell of another's text."""
    past = {"method": "suffix", "suffix_decoding_max_cached_requests": 8}
    accepted: list[int] = []
    async with served(tmp_path, draft=None, k=8, speculative=past) as client:
        for tenant in ("red", "blue", "red"):
            answer = await client.ask(
                tenant, max_tokens=60, ignore_eos=True, speculation_metrics="summary"
            )
            spec = answer["metrics"]["speculative_decoding"]
            accepted.append(spec["num_accepted_draft_tokens"])

    assert accepted[1] == accepted[0]
    assert accepted[2] > accepted[0]


async def test_another_tenant_s_grammar_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long a schema takes does not tell whether another tenant uses it too."""
    compilers: set[int] = set()
    compile_it = GrammarCompiler._compile

    def watched(self: GrammarCompiler, text: str, tokenizer: Any) -> Any:
        compilers.add(id(self))
        return compile_it(self, text, tokenizer)

    monkeypatch.setattr(GrammarCompiler, "_compile", watched)
    found: list[set[int]] = []
    async with served(tmp_path, draft=None, speculative={"method": "ngram"}) as client:
        for tenant in ("red", "blue", "red", "blue"):
            compilers.clear()
            await client.ask(tenant, guided_regex="[0-9a-zA-Z]{3}", max_tokens=8)
            found.append({*compilers})

    assert len(found[0]) >= 2  # the gateway's, and the target's
    assert found == [found[0], found[0], set(), set()]
