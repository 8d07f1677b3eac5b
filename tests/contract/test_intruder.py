"""What an intruder tries first; docs/security.md has the list and each answer.

Here are those that cross several parts; `test_authentication.py` (keys), `test_mutual_tls.py`
(strangers on internal ports), `test_refusing.py` (slow and broken HTTP), `test_garbled_messages.py`
(protobuf) and `test_validation.py` (fields) have the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
from typing import Any

import grpc
import httpx
import psutil
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from helpers.pair import TARGET, Generated, greedy_tokens, make_request, running_pair
from specserve.config import ServerConfig
from specserve.gateway.config import GatewayConfig
from specserve.rpc.channel import MAX_MESSAGE_BYTES
from specserve.rpc.metrics_endpoint import MetricsEndpoint
from unit.gateway.fakes import MODEL, FakeBackend, make_app, make_client
from unit.gateway.test_refusing import HEAD, exchange
from unit.gateway.test_server import gateway

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FORGED = "x\n2026-01-01 00:00:00 ERROR specserve: all keys revoked\x1b[2J"


async def test_an_oversized_frame_ends_its_own_call_alone() -> None:
    """A message above the limit of both ends is refused by its length; a live stream goes on."""
    async with running_pair(TARGET + ",step_ms=2") as pair:
        answer, stream = Generated(), pair.blocks(make_request(max_tokens=60))
        await pair.take(stream, answer, 5)
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(pair.target.address, options=options) as channel:
            call = channel.stream_stream("/specserve.rpc.v1.TargetService/Verify")()
            await call.write(bytes(MAX_MESSAGE_BYTES + 1))
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await pair.finish(stream, answer)
        assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), 60)


BOMB = gzip.compress(bytes(10_000_000), 9)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "GZIP", "gzip, identity"])
async def test_a_packed_body_is_not_unpacked(coding: str) -> None:
    """Zip bomb: 10 kB that would be 10 MB."""
    assert len(BOMB) < 20_000
    backend = FakeBackend()
    async with make_client(backend) as client:
        for path in (COMPLETIONS, CHAT, "/tokenize"):
            answer = await client.post(path, content=BOMB, headers={"content-encoding": coding})
            assert answer.status_code == 400
            assert "content-encoding" in answer.json()["error"]["message"]
    assert backend.requests == []


NESTED = 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"[" * NESTED,
        b'{"prompt":' + b"[" * NESTED + b"]" * NESTED + b"}",
        b'{"response_format":' + b'{"a":' * NESTED + b"1" + b"}" * NESTED + b"}",
        b'{"prompt": "x", "logit_bias": {'
        + b",".join(b'"%d": 1' % i for i in range(50_000))
        + b"}}",
        b'{"prompt": "x", "seed": ' + b"9" * 500_000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "prompt": "y", "n": 1e400}',
        b"\x00" * 1000,
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
    ],
)
async def test_a_body_made_to_hurt_the_parser_is_a_400(body: bytes) -> None:
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, content=body)
        after = await client.post(COMPLETIONS, json={"prompt": "x"})

    assert (answer.status_code, after.status_code) == (400, 200)
    assert len(answer.content) < 2000


def _nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _doubling(keyword: str) -> dict[str, Any]:
    """Return a schema that says everything twice, 25 levels deep."""
    levels = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}
    return {"$defs": {**levels, "d25": {"type": "string"}}, "$ref": "#/$defs/d0"}


PROPERTY = {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"}

BOMBS: dict[str, dict[str, Any]] = {
    "nested quantifiers": {"guided_regex": "(a+)+" * 1000 + "$"},
    "too long": {"guided_regex": "a|" * 100_000},
    "counted": {"guided_regex": "a{1,1000000}"},
    "counted counts": {"guided_regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "states double": {"guided_regex": ".*(a.{100}|b.{90}|c.{80}|d.{70}|e.{60})"},
    "deep parentheses": {"guided_regex": "(" * 4000 + "a" + ")" * 4000},
    "large classes": {"guided_regex": r"(\p{L}|\p{N}){1,5000}"},
    "back-reference": {"guided_regex": r"(a)\1"},
    "look-around": {"guided_regex": "(?=a)b"},
    "deep schema": {"guided_json": _nested_schema(80)},
    "wide schema": {"guided_json": {"properties": {f"p{i}": PROPERTY for i in range(1000)}}},
    "long array": {"guided_json": {"type": "array", "minItems": 10**6, "maxItems": 10**6}},
    "long string": {"guided_json": {"type": "string", "minLength": 10**6, "maxLength": 10**7}},
    "itself": {"guided_json": {"$ref": "#"}},
    "allOf doubles": {"guided_json": _doubling("allOf")},
    "anyOf doubles": {"guided_json": _doubling("anyOf")},
    "oneOf doubles": {"guided_json": _doubling("oneOf")},
    "remote reference": {"guided_json": {"$ref": "http://169.254.169.254/latest/meta-data"}},
    "file reference": {"guided_json": {"$ref": "file:///etc/passwd"}},
    "ambiguous": {"guided_grammar": 'start: e\ne: e e | e e e | "a" | \n'},
    "left recursion": {"guided_grammar": 'start: start start | "a"\n'},
    "library options": {"guided_grammar": '%llguidance {"no_forcing": false}\nstart: "a"\n'},
    "import": {"guided_grammar": "%import /etc/passwd\nstart: /a/\n"},
    "many choices": {"guided_choice": [f"{i:08d}" for i in range(2000)]},
}


@pytest.mark.parametrize("fields", [pytest.param(v, id=k) for k, v in BOMBS.items()])
async def test_b233_a_language_made_to_hurt_is_refused_or_harmless(fields: dict[str, Any]) -> None:
    """B233: what is compiled within the library's limits is answered; the rest is a 400.

    That it ends at all is what is tested: each would take hours, or all memory, if it were let.
    """
    async with make_client(FakeBackend()) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x", **fields})
        after = await client.post(COMPLETIONS, json={"prompt": "x"})

    assert answer.status_code in (200, 400)
    assert after.status_code == 200
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"].split(".")[0] == next(iter(fields))
        assert "root:" not in error["message"]
        assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (COMPLETIONS, {"prompt": "x", "model": FORGED}, {}),
        (COMPLETIONS, {"prompt": "x", FORGED: 1}, {}),
        (COMPLETIONS, {"prompt": "x", "user": FORGED}, {}),
        (COMPLETIONS, {"prompt": "x"}, {"x-request-id": FORGED}),
        (COMPLETIONS, {"prompt": "x"}, {"x-request-id": "../../etc/passwd"}),
        (COMPLETIONS, {"prompt": "x"}, {"traceparent": FORGED, "tracestate": FORGED}),
        (COMPLETIONS, {"prompt": "x"}, {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"}),
        (f"/v1/models/{FORGED}", None, {}),
        (f"/{FORGED}", None, {}),
        ("/v1/models/../../../../etc/passwd", None, {}),
        ("/v1/models/..%2f..%2f..%2fetc%2fpasswd", None, {}),
        ("/v1/models/{{7*7}}${7*7}<script>", None, {}),
    ],
)
@pytest.mark.parametrize("breaks", [False, True])
async def test_nothing_a_client_names_forges_a_log_line(
    path: str,
    body: dict[str, Any] | None,
    headers: dict[str, str],
    breaks: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Request ids, model names, fields, paths, trace headers; what breaks inside included."""
    script: Any = lambda _: [RuntimeError(FORGED)]  # noqa: E731
    backend = FakeBackend(script) if breaks else FakeBackend()
    if breaks:
        backend.pair_error = RuntimeError(FORGED) if body is None else None
    app = make_app(backend)
    with caplog.at_level(logging.DEBUG):
        status, answer = await _by_hand(app, path, body, headers)

    assert status in (200, 400, 404, 500)
    assert "root:" not in answer
    assert "49" not in answer or status == 200
    for record in caplog.records:
        line = record.getMessage()
        assert "\n" not in line, line
        assert "\x1b" not in line, line


async def _by_hand(
    app: FastAPI, path: str, body: dict[str, Any] | None, headers: dict[str, str]
) -> tuple[int, str]:
    """Send what no HTTP client would: a server that decodes a path gives the application this."""
    sent: list[Any] = []
    received: list[bool] = []

    async def receive() -> dict[str, Any]:
        if received:
            await asyncio.Event().wait()  # the client stays
        received.append(True)
        return {"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "server": ("gateway", 80),
        "scheme": "http",
    }
    with contextlib.suppress(RuntimeError):  # Starlette tells the server, behind its answer of 500
        await app(scope, receive, send)
    assert all(b"\n" not in v for _, v in sent[0]["headers"])
    text = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    return int(sent[0]["status"]), text


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        # Two lengths, or a length and chunks: no proxy in front may read another request than we.
        (HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /x", 400),
        (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"\x00" + b"\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\rb\r\n\r\n", 400),
        (b"GET " + b"/a" * 100_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 431),
    ],
)
async def test_a_request_with_two_meanings_is_none(sent: bytes, status: int) -> None:
    backend = FakeBackend()
    async with gateway(backend) as running:
        found, _, _ = await exchange(running.url, sent)
        async with httpx.AsyncClient(base_url=running.url) as client:
            assert (await client.get("/health")).status_code == 200

    assert found == status
    assert backend.requests == []


async def test_b238_only_the_ports_that_are_documented_listen_and_on_loopback() -> None:
    """B238: each service has its one gRPC port; nothing binds to all interfaces by itself."""
    before = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
    async with running_pair() as pair:
        assert pair.draft is not None
        ours = {pair.target.address, pair.draft.address, pair.orchestrator.address}
        listening = {
            c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"
        }
        found = {f"{a.ip.removeprefix('::ffff:')}:{a.port}" for a in listening - before}
        assert found == ours
    for config in (ServerConfig(), GatewayConfig()):
        assert config.host == "127.0.0.1"


async def test_a_metrics_port_has_metrics_and_nothing_else() -> None:
    """Whatever is asked for, and however: no file is read, nothing is changed."""
    endpoint = MetricsEndpoint.start(ServerConfig(metrics_port=0), CollectorRegistry())
    assert endpoint is not None
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{endpoint.port}") as client:
            for path in (
                "/metrics",
                "/../../etc/passwd",
                "/%2e%2e/%2e%2e/etc/passwd",
                "/favicon.ico",
            ):
                for method in ("GET", "POST", "PUT", "DELETE"):
                    answer = await client.request(method, path)
                    assert "root:" not in answer.text
                    assert answer.status_code in (200, 404, 405, 501)
    finally:
        await endpoint.stop()


async def test_another_name_of_the_model_is_not_looked_for_on_the_disk() -> None:
    async with make_client(FakeBackend()) as client:
        for name in ("../../etc/passwd", "/etc/passwd", "file:///etc/passwd", f"{MODEL}/../x"):
            answer = await client.post(COMPLETIONS, json={"prompt": "x", "model": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
