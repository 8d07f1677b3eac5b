"""Doubles for the gateway's tests: a scripted backend, a byte tokenizer, and a client with hands.

Nothing here sleeps: scripts wait on events, and the client says when it reads and when it goes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI

from specserve.gateway.config import GatewayConfig
from specserve.gateway.http import create_http_app
from specserve.gateway.metrics import GatewayMetrics
from specserve.model.token_table import TokenTable
from specserve.rpc.codec import pack_ids, pack_method, unpack_ids
from specserve.rpc.v1 import common_pb2, generation_pb2
from specserve.rpc.v1.generation_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GetPairResponse,
    GetStatusResponse,
    SpeculationRecord,
)
from specserve.rpc.v1.requests_pb2 import RequestRecord
from specserve.telemetry import Tracing

EOS = 256
VOCAB_SIZE = 300
MAX_MODEL_LEN = 64
MODEL = "fake-target"

Step = GenerateResponse | Exception | asyncio.Event
Script = Callable[[GenerateRequest], Sequence[Step]]

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH


def block(
    text: bytes,
    finish: int = 0,
    token_ids: Sequence[int] | None = None,
    **fields: Any,
) -> GenerateResponse:
    """Make one response; its ids are the text's bytes unless given."""
    ids = list(text) if token_ids is None else token_ids
    return GenerateResponse(token_ids=pack_ids(ids), text=text, finish_reason=finish, **fields)


def logprob(value: float, top: Mapping[int, float] | None = None) -> generation_pb2.TokenLogprob:
    """Make one token's log-probabilities."""
    top = top or {}
    return generation_pb2.TokenLogprob(
        logprob=value,
        top_token_ids=pack_ids(list(top)),
        top_logprobs=np.asarray(list(top.values()), "<f4").tobytes(),
    )


def hello(request: GenerateRequest) -> Sequence[Step]:
    """Say hello in two blocks."""
    record = SpeculationRecord(
        num_spec_steps=2,
        num_draft_tokens=6,
        num_accepted_draft_tokens=3,
        num_recovered_tokens=1,
        num_bonus_tokens=1,
        accepted_per_position=[2, 1, 0],
        num_speculative_tokens=3,
    )
    return [block(b"Hel"), block(b"lo", STOP, record=record)]


class ByteTokenizer:
    """Id i is byte i; 256 is EOS; a few more ids are padding."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Give the bytes."""
        return list(text.encode())

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], **options: object
    ) -> list[int]:
        """Give `role:content|` of each message."""
        return list("".join(f"{m['role']}:{m['content']}|" for m in messages).encode())

    def token_table(self) -> TokenTable:
        """Return what each id stands for."""
        rest = [b""] * (VOCAB_SIZE - EOS - 1)
        return TokenTable((*(bytes([i]) for i in range(256)), b"<eos>", *rest), frozenset({EOS}))


class FakeBackend:
    """Plays a script per request and keeps count of what is open."""

    def __init__(self, script: Script = hello) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.traceparents: list[str] = []
        self.open: set[str] = set()
        self.finished: set[str] = set()
        self.changed = asyncio.Event()
        self.pair = pair()
        self.pair_error: Exception | None = None
        self.statuses: list[GetStatusResponse] = []
        self.records: list[RequestRecord] = []
        self.num_pair_calls = 0

    async def generate(
        self, request: GenerateRequest, traceparent: str = ""
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Play the script."""
        self.requests.append(request)
        self.traceparents.append(traceparent)
        self.open.add(request.request_id)
        self._change()
        try:
            for step in self.script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    if step.finish_reason:
                        self.finished.add(request.request_id)
                    yield step
        finally:
            self.open.discard(request.request_id)
            self._change()

    async def get_pair(self) -> GetPairResponse:
        """Return the pair, or raise what was set."""
        self.num_pair_calls += 1
        if self.pair_error is not None:
            raise self.pair_error
        return self.pair

    async def get_status(self) -> list[GetStatusResponse]:
        """Return what was set."""
        return self.statuses

    async def get_requests(self, name: str) -> list[RequestRecord]:
        """Return those of that id."""
        return [record for record in self.records if record.request_id == name]

    async def list_requests(self, limit: int) -> list[RequestRecord]:
        """Return as many as were set."""
        return self.records[:limit]

    async def close(self) -> None:
        """Nothing to close."""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is looked at whenever a choice opens or closes."""
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _change(self) -> None:
        self.changed.set()


def pair(**fields: Any) -> GetPairResponse:
    """Make a ready pair."""
    return GetPairResponse(
        **{
            "ready": True,
            "target": common_pb2.GetModelResponse(
                model_id=MODEL,
                vocab_size=VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=pack_ids([EOS]),
            ),
            "draft": common_pb2.GetModelResponse(model_id="fake-draft", vocab_size=VOCAB_SIZE),
            "num_speculative_tokens": 4,
            "speculation_enabled": True,
            "rejection_sample_method": "auto",
            "speculative_methods": [pack_method("ngram"), pack_method("suffix")],
            **fields,
        }
    )


def make_app(
    backend: FakeBackend,
    metrics: GatewayMetrics | None = None,
    tracing: Tracing | None = None,
    **config: Any,
) -> FastAPI:
    """Build the application over a fake."""
    return create_http_app(backend, ByteTokenizer(), GatewayConfig(**config), metrics, tracing)


def make_client(
    backend: FakeBackend, app: FastAPI | None = None, **config: Any
) -> httpx.AsyncClient:
    """Build a client of an application over a fake; answers come whole."""
    app = app or make_app(backend, **config)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def prompt_of(request: GenerateRequest) -> bytes:
    """Return a request's prompt as bytes."""
    return bytes(unpack_ids(request.prompt_token_ids, "prompt"))


def events_of(text: str) -> list[Any]:
    """Read server-sent events; `[DONE]` stays text."""
    parts = [part for part in text.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in parts)
    data = [part.removeprefix("data: ") for part in parts]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


class Exchange:
    """One HTTP exchange by hand: reads when told to, and may go away at any time."""

    def __init__(
        self,
        app: FastAPI,
        path: str,
        body: Mapping[str, Any] | bytes,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> None:
        self.status: int | None = None
        self.body = b""
        self.reads = asyncio.Semaphore(0)
        """Permits for the server's writes; a reader that stops reading gives none."""
        self.changed = asyncio.Event()
        self._app = app
        self._raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._reads_all = False
        self._gone = asyncio.Event()
        self._body_sent = False
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
            "client": ("test", 1),
            "server": ("gateway", 80),
        }

    def start(self) -> asyncio.Task[None]:
        """Send the request."""
        return asyncio.create_task(self._app(self._scope, self._receive, self._send))

    def read_all(self) -> None:
        """Read as fast as it comes."""
        self._reads_all = True
        self.reads.release()  # for a write that waits already

    def disconnect(self) -> None:
        """Go away."""
        self._gone.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is looked at after each write."""
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def _receive(self) -> dict[str, Any]:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._raw, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self._reads_all:
            await self.reads.acquire()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
        self.changed.set()
