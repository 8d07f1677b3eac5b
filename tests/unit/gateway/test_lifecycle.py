"""Clients that leave, read slowly or send too much; backends that fail early or in the stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from specserve import errors
from specserve.gateway import answering
from specserve.gateway.config import TenantLimits
from specserve.gateway.errors import is_mapped, to_http
from specserve.gateway.receiving import MAX_DISCARD_BYTES
from specserve.rpc.status import RemoteError
from specserve.rpc.v1.generation_pb2 import GenerateRequest
from unit.gateway.fakes import (
    STOP,
    Exchange,
    FakeBackend,
    Step,
    block,
    events_of,
    make_app,
    make_client,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PATHS = [COMPLETIONS, CHAT]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}


def forever(request: GenerateRequest) -> Sequence[Step]:
    """Say one block and then nothing."""
    return [block(b"x"), asyncio.Event()]


def silent(request: GenerateRequest) -> Sequence[Step]:
    """Say nothing at all."""
    return [asyncio.Event()]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("script", [silent, forever])
async def test_a_client_that_goes_away_frees_every_choice(
    path: str, streamed: bool, script: Any
) -> None:
    """B074, B076: before the first block and after it, streamed or not, all choices are closed."""
    backend = FakeBackend(script)
    body = {**BODIES[path], "n": 3, "stream": streamed}
    exchange = Exchange(make_app(backend), path, body)
    exchange.read_all()
    task = exchange.start()
    await backend.until(lambda: len(backend.open) == 3)
    if streamed and script is forever:
        await exchange.until(lambda: b"x" in exchange.body)
    exchange.disconnect()
    await asyncio.wait_for(task, 5)

    assert backend.open == set()
    assert backend.finished == set()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_at_once_leaves_nothing(streamed: bool) -> None:
    """B074: gone before the body was looked at; the next request works."""
    backend = FakeBackend(silent)
    app = make_app(backend)
    exchange = Exchange(app, COMPLETIONS, {"prompt": "hi", "stream": streamed})
    exchange.disconnect()
    await asyncio.wait_for(exchange.start(), 5)
    assert backend.open == set()

    backend.script = lambda _: [block(b"y", STOP)]
    after = Exchange(app, COMPLETIONS, {"prompt": "hi"})
    after.read_all()
    await after.start()
    assert after.status == 200


async def test_a_client_that_goes_away_while_its_prompt_is_tokenised_is_not_decoded() -> None:
    """B074: the pair is being asked for when the client leaves."""
    backend = FakeBackend()
    asked = asyncio.Event()

    async def never() -> Any:
        asked.set()
        await asyncio.Event().wait()

    backend.get_pair = never
    exchange = Exchange(make_app(backend), COMPLETIONS, {"prompt": "hi"})
    task = exchange.start()
    await asyncio.wait_for(asked.wait(), 5)
    exchange.disconnect()
    await asyncio.wait_for(task, 5)

    assert backend.requests == []


async def test_the_server_cancelling_a_request_frees_its_choices() -> None:
    """A proxy that notices the client's going cancels the request's task."""
    backend = FakeBackend(silent)
    task = Exchange(make_app(backend), COMPLETIONS, {"prompt": "hi", "n": 2}).start()
    await backend.until(lambda: len(backend.open) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert backend.open == set()


async def test_a_slow_reader_holds_no_choice() -> None:
    """The client reads one event and no more; decoding goes on to its end, and KV is free."""
    backend = FakeBackend(lambda _: [*[block(b"x")] * 500, block(b"", STOP)])
    exchange = Exchange(make_app(backend), COMPLETIONS, {"prompt": "hi", "stream": True})
    exchange.reads.release()
    exchange.reads.release()
    task = exchange.start()
    await backend.until(lambda: bool(backend.finished) and not backend.open)
    read_so_far = len(exchange.body)
    exchange.read_all()
    await asyncio.wait_for(task, 5)

    assert read_so_far < len(exchange.body) / 100
    assert events_of(exchange.body.decode())[-1] == "[DONE]"
    assert len(events_of(exchange.body.decode())) == 502


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("num_reads", [0, 1, 2])
async def test_a_client_that_stops_reading_is_given_up_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, path: str, streamed: bool, num_reads: int
) -> None:
    """Like one that has gone: no choice is left, and its place under a limit is another's."""
    monkeypatch.setattr(answering, "SEND_SLACK_S", 0.0)
    backend = FakeBackend(lambda _: [*[block(b"x")] * 3, block(b"", STOP)])
    limits = TenantLimits(max_concurrent_sessions=1)
    app = make_app(backend, request_timeout_s=0.01, limits=limits)
    exchange = Exchange(app, path, {**BODIES[path], "stream": streamed})
    for _ in range(num_reads):
        exchange.reads.release()
    await asyncio.wait_for(exchange.start(), 5)
    assert b"[DONE]" not in exchange.body
    assert backend.open == set()

    # In time or not: one that reads on is answered.
    after = Exchange(app, path, BODIES[path])
    after.read_all()
    await asyncio.wait_for(after.start(), 5)
    assert after.status == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.CapacityExhausted("KV blocks", 5, 1), 503, "capacity_exhausted"),
        (errors.Overloaded("9 requests wait", 7.2), 429, "overloaded"),
        (errors.PeerUnavailable("target", "none"), 503, "unavailable"),
        (errors.Draining("o1"), 503, "draining"),
        (errors.DeadlineExpired("the request", 1.0), 504, "deadline_expired"),
        (errors.NonFiniteLogits("s", 0), 500, "non_finite_logits"),
        (errors.PoisonRequest("r", 2), 500, "poison_request"),
        (errors.InvalidRequest("top_k", "no"), 400, None),
        (RemoteError("CapacityExhausted", 8, "KV blocks"), 503, "capacity_exhausted"),
        (RemoteError("Novelty", 8, "?"), 503, "capacity_exhausted"),
        (RemoteError("", 13, "?"), 500, None),
        (RemoteError("", 3, "?"), 500, None),
        (RemoteError("Novelty", 3, "field: no"), 400, None),
        (RuntimeError("secret"), 500, None),
    ],
)
async def test_an_error_before_the_first_block_has_its_status(
    path: str, streamed: bool, error: Exception, status: int, code: str | None
) -> None:
    """B259: with stream too, nothing has been sent yet, so the status tells."""
    backend = FakeBackend(lambda _: [error])
    async with make_client(backend) as client:
        answer = await client.post(path, json={**BODIES[path], "n": 2, "stream": streamed})
    found = answer.json()["error"]

    assert answer.status_code == status
    assert set(found) == {"message", "type", "param", "code"}
    assert found["code"] == code
    assert "secret" not in found["message"]
    after = {429: "8", 503: "1"}.get(status)
    assert answer.headers.get("retry-after") == after
    assert answer.headers["x-request-id"]
    assert backend.open == set()


INTERNAL = "ipv4:10.0.0.7:7003: Failed to connect to remote host"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        errors.PeerUnavailable("orchestrator", INTERNAL),
        errors.ModelMismatch("10.0.0.7:7003", "a", "b"),
        errors.CapacityExhausted(INTERNAL, 1, 0),
        errors.Draining("replica-10.0.0.7:7003"),
        errors.DeadlineExpired(INTERNAL, 1.0),
        errors.SessionNotFound("10.0.0.7:7003"),
        errors.ModelUnavailable(INTERNAL),
        RemoteError("Preempted", 10, INTERNAL),
        RemoteError("", 14, INTERNAL),
        RemoteError("", 13, INTERNAL),
    ],
)
async def test_a_client_learns_what_is_the_matter_and_the_log_the_rest(
    error: Exception, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain words instead of a peer's text and addresses; these are in the log, with the id."""
    backend = FakeBackend(lambda _: [block(b"x"), error])
    body = {"prompt": "hi", "stream": streamed}
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, json=body)
    found = events_of(answer.text)[-1]["error"] if streamed else answer.json()["error"]

    assert len(found["message"].split()) > 3
    assert "10.0.0.7" not in answer.text
    assert "ipv4" not in answer.text
    assert answer.headers["x-request-id"] in caplog.text
    if not isinstance(error, RemoteError) or error.error:
        assert "10.0.0.7:7003" in caplog.text


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_in_the_stream_is_one_event_and_the_end(path: str) -> None:
    """B259: no [DONE], no silence; the other choices are given up."""
    failure = errors.PeerUnavailable("target", "none answers")

    def script(request: GenerateRequest) -> Sequence[Step]:
        if request.sampling.choice == 0:
            return [block(b"ok"), failure]
        return [asyncio.Event()]

    backend = FakeBackend(script)
    async with make_client(backend) as client:
        body = {**BODIES[path], "n": 2, "stream": True}
        answer = await asyncio.wait_for(client.post(path, json=body), 5)
    events = events_of(answer.text)

    assert answer.status_code == 200
    assert "choices" in events[-2]
    assert events[-1]["error"]["code"] == "unavailable"
    assert sum("error" in event for event in events) == 1
    assert backend.open == set()


async def test_a_stream_that_ends_without_a_reason_is_an_error() -> None:
    """A backend that stops in the middle must not look like a finished text."""
    async with make_client(FakeBackend(lambda _: [block(b"half")])) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "hi"})
        streamed = await client.post(COMPLETIONS, json={"prompt": "hi", "stream": True})

    assert answer.status_code == 503
    assert "error" in events_of(streamed.text)[-1]


def subclasses(of: type[errors.SpecServeError]) -> list[type[errors.SpecServeError]]:
    """Return all classes below one."""
    return [c for child in of.__subclasses__() for c in [child, *subclasses(child)]]


@pytest.mark.parametrize(
    "kind", [c for c in subclasses(errors.SpecServeError) if c is not RemoteError]
)
def test_every_error_has_a_status(kind: type[errors.SpecServeError]) -> None:
    """A new error class needs a row in gateway/errors.py."""
    if kind.__module__.startswith("specserve"):
        assert is_mapped(kind)


def test_a_context_overflow_of_a_peer_keeps_its_code() -> None:
    """Some classes travel whole, others by name: both are answered alike."""
    whole = to_http(errors.ContextOverflow("prompt", "too long"))
    named = to_http(RemoteError("ContextOverflow", 11, "too long"))

    assert (whole.status, whole.code) == (named.status, named.code)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/completions/", 404),
        ("POST", "//v1/completions", 404),
        ("POST", "/V1/completions", 404),
        ("GET", "/v1/models/other", 404),
    ],
)
async def test_wrong_paths_and_methods_have_openai_s_shape(
    method: str, path: str, status: int
) -> None:
    """B245: another spelling of a path is not that path, and is not redirected to it."""
    async with make_client(FakeBackend()) as client:
        answer = await client.request(method, f"http://gateway{path}", json={"prompt": "x"})

    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_says_it_is_too_long_is_not_read() -> None:
    """413 goes out before any of the body is taken in, and the next request works."""
    app = make_app(FakeBackend())
    exchange = Exchange(app, COMPLETIONS, b"", {"content-length": str(10_000_000)})
    exchange.read_all()
    received = 0
    answered_after: list[int] = []

    async def receive() -> dict[str, Any]:
        nonlocal received
        if exchange.status is not None:
            answered_after.append(received)
        received += 65_536
        return {"type": "http.request", "body": b"x" * 65_536, "more_body": received < 10_000_000}

    exchange._receive = receive
    await exchange.start()

    assert exchange.status == 413
    assert b"1048576 bytes" in exchange.body
    assert answered_after[0] == 0


async def test_a_body_of_unknown_length_is_read_up_to_the_limit() -> None:
    """No more than the limit and one part is held; an endless body is cut off."""
    app = make_app(FakeBackend(), max_body_bytes=100_000)
    exchange = Exchange(app, COMPLETIONS, b"")
    exchange.read_all()
    received = 0
    answered_after: list[int] = []

    async def receive() -> dict[str, Any]:
        nonlocal received
        if exchange.status is not None:
            answered_after.append(received)
        received += 4 * 1024 * 1024
        return {"type": "http.request", "body": bytes(4 * 1024 * 1024), "more_body": True}

    exchange._receive = receive
    await asyncio.wait_for(exchange.start(), 5)

    assert exchange.status == 413
    assert answered_after[0] == 4 * 1024 * 1024
    assert received <= MAX_DISCARD_BYTES + 8 * 1024 * 1024


async def test_a_body_that_breaks_off_is_nobody_s() -> None:
    """The client leaves while it sends: no answer, no error, nothing decoded."""
    backend = FakeBackend()
    exchange = Exchange(make_app(backend), COMPLETIONS, b"{}")

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    exchange._receive = receive
    await exchange.start()

    assert exchange.status is None
    assert backend.requests == []


@pytest.mark.parametrize("path", PATHS)
async def test_no_prompt_and_no_text_is_ever_logged(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B250: a canary in prompt and output is in no log line, errors and refusals included."""
    canary = "canary7f3a"
    scripts: list[Any] = [
        lambda _: [block(canary.encode(), STOP)],
        lambda _: [block(canary.encode()), errors.PeerUnavailable("target", "gone")],
        lambda _: [RuntimeError("broken")],
    ]
    body = (
        {"prompt": canary}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": canary}]}
    )
    with caplog.at_level(logging.DEBUG):
        for script in scripts:
            async with make_client(FakeBackend(script)) as client:
                await client.post(path, json=body)
                await client.post(path, json={**body, "stream": True})
                await client.post(path, json={**body, "temperature": canary})

    assert canary not in caplog.text
