"""/tokenize and /detokenize say what the completions read, and X-Request-Id comes back."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from specserve.gateway import requests, token_routes
from specserve.gateway.config import GatewayConfig
from specserve.gateway.http import create_http_app
from specserve.model.token_table import TokenTable
from unit.gateway.fakes import (
    EOS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    ByteTokenizer,
    FakeBackend,
    events_of,
    make_client,
    prompt_of,
)

MESSAGES = [{"role": "user", "content": "hé"}]


async def test_a_text_s_ids_are_those_that_a_completion_decodes_from() -> None:
    """Ids, count and limit; the strings when asked for."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = (await client.post("/tokenize", json={"prompt": "hé"})).json()
        shown = await client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})
        await client.post("/v1/completions", json={"prompt": "hé"})

    assert bytes(answer["tokens"]) == prompt_of(backend.requests[0])
    assert (answer["count"], answer["max_model_len"]) == (3, MAX_MODEL_LEN)
    assert answer["token_strs"] is None
    assert shown.json()["token_strs"] == ["h", "i"]


async def test_a_chat_s_ids_are_those_that_it_is_answered_from() -> None:
    """The template is applied as the chat endpoint does."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
        await client.post("/v1/chat/completions", json={"messages": MESSAGES})

    assert bytes(answer["tokens"]) == prompt_of(backend.requests[0])


class Unreadable(bytes):
    """What an id stands for, where nobody is to read it by itself."""

    def decode(self, *arguments: Any, **named: Any) -> str:
        raise AssertionError("a single token was read")


class UnreadableTokenizer(ByteTokenizer):
    """Encodes; none of its tokens can be read by itself."""

    def token_table(self) -> TokenTable:
        table = super().token_table()
        return TokenTable(tuple(map(Unreadable, table.token_bytes)), table.special_token_ids)


async def test_texts_of_single_tokens_are_made_only_where_they_are_asked_for() -> None:
    """They are most of the work."""
    backend = FakeBackend()
    app = create_http_app(backend, UnreadableTokenizer(), GatewayConfig())
    async with make_client(backend, app) as client:
        plain = await client.post("/tokenize", json={"prompt": "hi"})
        shown = await client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})

    assert plain.json()["tokens"] == [104, 105]
    assert shown.status_code == 500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
        ("/detokenize", {"tokens": [104, 105]}),
    ],
)
async def test_a_long_body_is_read_and_answered_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """B254: a megabyte of ids takes a third of a second each way; a short one stays."""
    threads: list[int] = []

    def watch(module: Any, name: str) -> None:
        work = getattr(module, name)

        def noted(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*arguments)

        monkeypatch.setattr(module, name, noted)

    watch(requests, "parse_body")
    watch(token_routes, "_written")
    async with make_client(FakeBackend()) as client:
        short = await client.post(path, json=body)
        assert threads == [threading.get_ident()] * 2
        threads.clear()
        for module in (requests, token_routes):
            monkeypatch.setattr(module, "LONG_BODY_BYTES", 10)
        long = await client.post(path, json=body)

    assert short.json() == long.json()
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_ids_become_the_text_they_stand_for() -> None:
    """Special tokens by name; half a character is no reason to fail."""
    async with make_client(FakeBackend()) as client:
        whole = await client.post("/detokenize", json={"tokens": [*"hé".encode(), EOS]})
        half = await client.post("/detokenize", json={"tokens": [104, 0xC3]})
        none = await client.post("/detokenize", json={"tokens": []})

    assert whole.json() == {"prompt": "hé<eos>"}
    assert half.json() == {"prompt": "h\ufffd"}
    assert none.json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"promt": "x"}, "promt"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
    ],
)
async def test_a_wrong_body_is_told_its_field(path: str, body: dict[str, Any], param: str) -> None:
    """A 400 as everywhere, also for an id that stands for nothing (B104)."""
    async with make_client(FakeBackend()) as client:
        answer = await client.post(path, json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_another_model_s_tokens_are_not_told(path: str) -> None:
    """404, as for a completion; a body that is too large is refused unread."""
    body = {"model": "other", **({"prompt": "x"} if path == "/tokenize" else {"tokens": [1]})}
    async with make_client(FakeBackend(), max_body_bytes=1024) as client:
        other = await client.post(path, json=body)
        large = await client.post(path, json={"prompt": "x" * 2000})

    assert other.status_code == 404
    assert large.status_code == 413


async def test_both_routes_are_in_the_openapi_document() -> None:
    """With the fields of their bodies."""
    async with make_client(FakeBackend()) as client:
        document = (await client.get("/openapi.json")).json()

    schemas = document["components"]["schemas"]
    assert {"/tokenize", "/detokenize"} <= document["paths"].keys()
    assert schemas["DetokenizeRequest"]["properties"].keys() == {"model", "tokens"}
    assert "messages" in schemas["TokenizeRequest"]["properties"]
    assert "token_strs" in schemas["Tokenized"]["properties"]
    assert "prompt" in schemas["Detokenized"]["properties"]


async def ask(client: httpx.AsyncClient, request_id: str, **fields: Any) -> httpx.Response:
    """Ask for a completion under an id."""
    body = {"prompt": "x", **fields}
    return await client.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})


async def test_a_client_s_own_request_id_comes_back_and_names_the_request() -> None:
    """In the header, in the answer's id, in errors, and in what the orchestrator is told."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        whole = await ask(client, "job-7:a.b")
        stream = await ask(client, "job-8", stream=True)
        wrong = await ask(client, "job-9", temperature=9)

    assert whole.headers["x-request-id"] == "job-7:a.b"
    assert whole.json()["id"] == "cmpl-job-7:a.b"
    assert stream.headers["x-request-id"] == "job-8"
    assert events_of(stream.text)[0]["id"] == "cmpl-job-8"
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (400, "job-9")
    assert [request.request_id for request in backend.requests] == [
        "cmpl-job-7:a.b-0",
        "cmpl-job-8-0",
    ]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", "ä", '"'])
async def test_an_id_that_is_unfit_for_a_log_line_is_replaced(given: str) -> None:
    """Spaces, length, other scripts: the request gets an id of ours and is served."""
    async with make_client(FakeBackend()) as client:
        answer = await client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": given.encode()}
        )

    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == answer.json()["id"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_system_fingerprint_is_that_of_the_target_and_of_no_draft(path: str) -> None:
    """The same on whole answers and every chunk; other weights or another dtype change it."""
    start = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    found = []
    for weights, dtype, draft in (
        ("aa", "float32", "d1"),
        ("aa", "float32", "d2"),
        ("bb", "float32", "d1"),
        ("aa", "bfloat16", "d1"),
    ):
        backend = FakeBackend()
        backend.pair.target.weights_fingerprint, backend.pair.target.dtype = weights, dtype
        backend.pair.draft.weights_fingerprint = draft
        async with make_client(backend) as client:
            whole = (await client.post(path, json=start)).json()
            stream = await client.post(path, json={**start, "stream": True})
        chunks = [event for event in events_of(stream.text) if event != "[DONE]"]
        assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}
        found.append(whole["system_fingerprint"])

    assert found[0].startswith("fp_")
    assert found[0] == found[1]
    assert len({*found}) == 3
