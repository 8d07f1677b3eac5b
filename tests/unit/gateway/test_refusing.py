"""What is no HTTP is answered like everything else, by either parser, on real sockets."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from specserve.gateway import refusing, server
from specserve.gateway.refusing import MAX_HEADER_BYTES, RefusingH11
from unit.gateway.fakes import STOP, FakeBackend, block
from unit.gateway.test_server import gateway

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "x"}'


@pytest.fixture(params=["h11", "httptools"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Serve with one of the two parsers."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    if request.param == "h11":
        monkeypatch.setattr(server, "parser_class", lambda: RefusingH11)
    return str(request.param)


async def exchange(
    url: str, sent: bytes, *, until_length: bool = False
) -> tuple[int, dict[str, str], Any]:
    """Send bytes as they are; return the answer's status, headers and body.

    Args:
        until_length: read as much as the answer says it has, not to the connection's end.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(5):
            if until_length:
                head = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
                body = await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0]))
            else:
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert len(body) == int(headers["content-length"])
    return int(status.split()[1]), headers, json.loads(body)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS by mistake\r\n\r\n", 400),
        (b"hello\r\n\r\n", 400),
        (HEAD + b"no colon\r\n\r\n" + BODY, 400),
        (HEAD + b"content-length: many\r\n\r\n" + BODY, 400),
        (HEAD + b"content-length: 15\r\ncontent-length: 16\r\n\r\n" + BODY, 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nnowhere\r\n{}\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}and more\r\n", 400),
        (HEAD + b"x-long: " + b"a" * MAX_HEADER_BYTES, 431),
        (HEAD + b"x-long: " + b"a" * 4 * MAX_HEADER_BYTES + b"\r\n\r\n" + BODY, 431),
        (HEAD + b"x-many: a\r\n" * 10_000, 431),
    ],
)
async def test_what_is_no_http_is_refused_in_openai_s_shape(
    parser: str, sent: bytes, status: int
) -> None:
    """The client sees why, nothing is decoded, and the next client is served."""
    backend = FakeBackend(lambda _: [block(b"y", STOP)])
    async with gateway(backend) as running:
        found, headers, body = await exchange(running.url, sent)
        decoded = list(backend.requests)
        async with httpx.AsyncClient(base_url=running.url) as client:
            after = await client.post("/v1/completions", content=BODY)

    assert found == status
    assert headers["content-type"] == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert decoded == []
    assert after.status_code == 200


async def test_garbage_puts_no_second_answer_into_the_middle_of_one(parser: str) -> None:
    """An answer under way may be cut short or come whole; nothing is put into it."""
    go_on = asyncio.Event()
    backend = FakeBackend(lambda _: [block(b"first"), go_on, block(b"last", STOP)])
    body = b'{"prompt": "x", "stream": true}'
    async with gateway(backend) as running:
        address = urlsplit(running.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(5):
                received = await reader.readuntil(b"first")
                writer.write(b"garbage\r\n\r\n")
                go_on.set()
                received += await reader.read()
        finally:
            writer.close()
    answer, _, after = received.partition(b"\r\n0\r\n\r\n")

    assert answer.count(b"HTTP/1.1") == 1
    assert after.startswith(b"HTTP/1.1 400") or not after


def test_the_fast_parser_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it everything works, slower."""
    monkeypatch.setattr(refusing, "find_spec", lambda name: None)

    assert refusing.parser_class() is RefusingH11


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a moment for headers, not seconds; long enough for what is sent at once to arrive."""
    monkeypatch.setattr(refusing, "HEADER_TIMEOUT_S", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "sent", [b"P", b"POST /v1/completions HTTP/1.1\r\n", HEAD, HEAD + b"x-a: b"]
)
async def test_headers_that_never_end_are_waited_for_so_long(parser: str, sent: bytes) -> None:
    """Slowloris: the connection is answered 408 and closed; nobody sends anything more."""
    backend = FakeBackend()
    async with gateway(backend) as running:
        found, headers, body = await exchange(running.url, sent)

    assert (found, headers["connection"]) == (408, "close")
    assert body["error"]["type"] == "invalid_request_error"
    assert backend.requests == []


@pytest.mark.usefixtures("impatient")
async def test_a_connection_that_says_nothing_is_closed(parser: str) -> None:
    """Without an answer: whoever opened it ahead of a request must not take that for its own."""
    async with gateway(FakeBackend()) as running:
        address = urlsplit(running.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.usefixtures("impatient")
async def test_a_request_that_takes_long_to_answer_is_not_late(parser: str) -> None:
    """The deadline is for headers: an answer, and the next request, may come later than that."""
    gone_by = asyncio.Event()
    backend = FakeBackend(lambda _: [block(b"x"), gone_by, block(b"y", STOP)])
    async with gateway(backend) as running, httpx.AsyncClient(base_url=running.url) as client:
        asked = asyncio.create_task(client.post("/v1/completions", content=BODY))
        # Another connection's deadline passes meanwhile.
        found, _, _ = await exchange(running.url, b"P")
        gone_by.set()
        first, second = await asked, await client.post("/v1/completions", content=BODY)

    assert (found, first.status_code, second.status_code) == (408, 200, 200)


async def test_a_body_that_never_ends_is_waited_for_so_long(parser: str) -> None:
    backend = FakeBackend()
    async with gateway(backend, body_timeout_s=0.05) as running:
        sent = HEAD + b"content-length: 100\r\n\r\n" + BODY
        found, _, body = await exchange(running.url, sent, until_length=True)

    assert (found, body["error"]["code"]) == (408, "body_too_slow")
    assert backend.requests == []
