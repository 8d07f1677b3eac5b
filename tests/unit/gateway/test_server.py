"""The gateway on real sockets: it starts, takes what it should, and stops with grace."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from specserve.gateway.config import GatewayConfig
from specserve.gateway.server import listen, serve_gateway
from specserve.rpc.v1.generation_pb2 import GenerateRequest
from unit.gateway.fakes import STOP, ByteTokenizer, FakeBackend, Step, block, events_of


class Running:
    """A gateway that listens."""

    def __init__(self, task: asyncio.Task[None], url: str) -> None:
        self.task = task
        self.url = url


@asynccontextmanager
async def gateway(backend: FakeBackend, **config: Any) -> AsyncIterator[Running]:
    """Serve on a free port; yields once it listens."""
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_listening(host: str, port: int) -> None:
        listening.set_result(f"http://{host}:{port}")

    settings = GatewayConfig(port=0, **config)
    task = asyncio.create_task(serve_gateway(settings, backend, ByteTokenizer(), on_listening))
    try:
        yield Running(task, await asyncio.wait_for(listening, 5))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_ten_megabyte_body_gets_a_413_and_the_next_request_works() -> None:
    """The client has sent it all when it reads the answer, and is not cut off."""
    async with gateway(FakeBackend()) as running, httpx.AsyncClient(base_url=running.url) as client:

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(160):
                yield bytes(65_536)

        answer = await client.post("/v1/completions", content=bytes(10_000_000))
        chunked = await client.post("/v1/completions", content=parts())
        after = await client.post("/v1/completions", json={"prompt": "hi"})

    for refused in (answer, chunked):
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "body_too_large"
    assert after.status_code == 200


async def test_blocks_arrive_as_they_are_decoded() -> None:
    """No part of the way holds events back."""
    go_on = asyncio.Event()

    def script(request: GenerateRequest) -> Sequence[Step]:
        return [block(b"first"), go_on, block(b"last", STOP)]

    async with (
        gateway(FakeBackend(script)) as running,
        httpx.AsyncClient(base_url=running.url) as client,
        client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer,
    ):
        parts = answer.aiter_text()
        received = await anext(parts)
        assert "first" in received
        assert "last" not in received
        go_on.set()
        received += "".join([part async for part in parts])

    assert events_of(received)[-1] == "[DONE]"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_dropped_connection_frees_the_choice(streamed: bool) -> None:
    """B074: over a real socket the server learns of it at once."""
    backend = FakeBackend(lambda _: [block(b"x"), asyncio.Event()])
    async with gateway(backend) as running:
        client = httpx.AsyncClient(base_url=running.url)
        body = {"prompt": "x", "stream": streamed}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await backend.until(lambda: bool(backend.open))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await client.aclose()
        await backend.until(lambda: not backend.open)


async def test_stopping_refuses_new_requests_and_lets_running_ones_finish() -> None:
    """A stop answers 503 with Retry-After, waits for what runs, and then ends."""
    go_on = asyncio.Event()
    backend = FakeBackend(lambda _: [block(b"x"), go_on, block(b"y", STOP)])
    async with gateway(backend) as running, httpx.AsyncClient(base_url=running.url) as client:
        asked = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await backend.until(lambda: bool(backend.open))
        running.task.cancel()
        refused = await client.post("/v1/chat/completions", json={"messages": []})
        ready, health = await client.get("/ready"), await client.get("/health")
        go_on.set()
        answer = await asyncio.wait_for(asked, 5)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running.task, 5)

    assert answer.json()["choices"][0]["text"] == "xy"
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "draining"
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert health.status_code == 200


@pytest.mark.parametrize("how", ["the grace ends", "a second stop"])
async def test_stopping_gives_up_what_does_not_finish_and_says_so(how: str) -> None:
    """Streams end with one error event, other requests with a 503; choices are freed."""
    backend = FakeBackend(lambda _: [block(b"x"), asyncio.Event()])
    grace_s = 0.0 if how == "the grace ends" else 600.0
    body = {"prompt": "x", "stream": True}
    async with (
        gateway(backend, shutdown_grace_s=grace_s) as running,
        httpx.AsyncClient(base_url=running.url) as client,
        client.stream("POST", "/v1/completions", json=body) as streamed,
    ):
        parts = streamed.aiter_text()
        received = await anext(parts)
        asked = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await backend.until(lambda: len(backend.open) == 2)
        running.task.cancel()
        if how == "a second stop":
            await until_not_ready(client)
            running.task.cancel()
        received += "".join([part async for part in parts])
        answer = await asyncio.wait_for(asked, 5)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running.task, 5)

    assert events_of(received)[-1]["error"]["code"] == "draining"
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert backend.open == set()


async def until_not_ready(client: httpx.AsyncClient) -> None:
    """Wait until new requests are refused."""
    async with asyncio.timeout(5):
        while (await client.get("/ready")).status_code == 200:
            pass


async def test_a_taken_port_is_an_error_at_once() -> None:
    """The caller is told; nothing is left listening."""
    async with gateway(FakeBackend()) as running:
        port = int(running.url.rsplit(":", 1)[1])
        with pytest.raises(OSError, match="in use"):
            await serve_gateway(GatewayConfig(port=port), FakeBackend(), ByteTokenizer())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux counts such a time")
def test_a_connection_whose_client_reads_nothing_ends_in_time() -> None:
    """Each inherits it: one that is closed with unread bytes would be kept for ever."""

    def timeout_ms(of: socket.socket) -> int:
        return of.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    with (
        listen("127.0.0.1", 0, 1.5) as listener,
        listen("127.0.0.1", 0, 1e9) as patient,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert timeout_ms(accepted) == 1500
        assert timeout_ms(patient) == 2**31 - 1
