"""One request from its body to the last byte of its answer, whichever endpoint it came to.

Everything from tokenising to the last chunk runs inside one scope that the client's going away
cancels. Knows ASGI and the parts it puts together; knows no field of a body.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specserve.gateway.backend import GenerationBackend
from specserve.gateway.choices import decoding
from specserve.gateway.config import GatewayConfig
from specserve.gateway.drain import Drain
from specserve.gateway.errors import ClientDisconnected, for_log, to_http
from specserve.gateway.fields import GenerationFields
from specserve.gateway.formats import AnswerFormat
from specserve.gateway.limits import Limiter
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.observer import RequestObserver
from specserve.gateway.off_loop import in_thread_if
from specserve.gateway.pair import PairWatch, ServedPair
from specserve.gateway.plan import GenerationPlan, check_priority
from specserve.gateway.receiving import read_body, unless_disconnected
from specserve.gateway.requests import parsed_body
from specserve.gateway.sending import SEND_SLACK_S, bounded
from specserve.gateway.shaping import as_event, padded, shaped
from specserve.gateway.tenants import Tenant, key_tenant, resolve_tenant
from specserve.telemetry import Tracing
from specserve.telemetry.logs import enter_request, leave_request

logger = logging.getLogger(__name__)

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

BodyT = TypeVar("BodyT", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[BodyT]):
    """What tells one endpoint from the other."""

    operation: str
    """Name of the operation in traces."""
    id_prefix: str
    """First part of answers' ids."""
    body_type: type[BodyT]
    """Shape of its bodies."""
    plan: Callable[[str, BodyT, ServedPair, Tenant], Awaitable[GenerationPlan]]
    """Checks and tokenises a body: (request id, body, pair, tenant) to a plan."""
    format: Callable[[GenerationPlan, BodyT, int], AnswerFormat[Any]]
    """Makes the writer of an answer: (plan, body, created) to a format."""


@dataclass(frozen=True, slots=True)
class Services:
    """What every request needs."""

    backend: GenerationBackend
    pair: PairWatch
    config: GatewayConfig
    drain: Drain
    limiter: Limiter
    metrics: GatewayMetrics
    tracing: Tracing


class GenerationAnswer(Response, Generic[BodyT]):
    """The answer to one request, made while it is sent.

    What goes wrong before the first block is raised, and becomes an ordinary HTTP answer. Later
    there is no status left to send: the stream ends with one error event.
    """

    def __init__(self, endpoint: Endpoint[BodyT], services: Services) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._services = services
        self._request_id = f"{endpoint.id_prefix}-{uuid.uuid4().hex}"
        self._header_id = self._request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, decode, answer. Cancelling this gives up every choice."""
        request = Request(scope, receive)
        if given := client_id(request.headers):
            self._request_id, self._header_id = f"{self._endpoint.id_prefix}-{given}", given
        request.state.request_id = self._header_id
        services = self._services
        observer = RequestObserver(
            self._endpoint.operation, request.headers, services.metrics, services.tracing
        )
        entered = enter_request(self._header_id, observer.context)
        error: BaseException | None = None
        try:
            with services.drain.running():
                tenant = resolve_tenant(request.headers, services.config, key_tenant(scope))
                config = services.config
                raw = await read_body(request, config.max_body_bytes, config.body_timeout_s)
                answering = self._answer(raw, tenant, observer, send)
                error = await unless_disconnected(receive, answering)
        except ClientDisconnected as gone:
            # Nobody reads an answer any more, and everything has been given up.
            error = gone
        except BaseException as other:
            error = other
            raise
        finally:
            observer.end(error)
            leave_request(entered)

    async def _answer(
        self, raw: bytes, tenant: Tenant, observer: RequestObserver, send: Send
    ) -> Exception | None:
        """Answer, and return the error that cut a stream short, if one did."""
        endpoint, services = self._endpoint, self._services
        body = await parsed_body(raw, endpoint.body_type)
        check_priority(body, tenant)
        pair = await services.pair.ready()
        observer.on_body()
        plan = await endpoint.plan(self._request_id, body, pair, tenant)
        for choice in plan.choices:
            choice.tenant_salt = tenant.salt
        num_prompt_tokens = sum(plan.prompt_lengths)
        with services.limiter.admitted(
            tenant,
            num_sessions=len(plan.choices),
            most_tokens=num_prompt_tokens + sum(choice.max_tokens for choice in plan.choices),
            used_tokens=lambda: num_prompt_tokens + observer.num_output_tokens,
        ):
            observer.on_plan(plan, body, tenant.name)
            return await self._decode(plan, body, observer, send)

    async def _decode(
        self, plan: GenerationPlan, body: BodyT, observer: RequestObserver, send: Send
    ) -> Exception | None:
        endpoint, services = self._endpoint, self._services
        answer = endpoint.format(plan, body, int(time.time()))
        send = bounded(send, services.config.request_timeout_s + SEND_SLACK_S)
        if body.stream:
            interval_s = services.config.stream_interval_ms / 1000
            pad_bytes = services.config.stream_pad_bytes
            events = self._events(plan, answer, observer)
            async with aclosing(shaped(events, interval_s, pad_bytes)) as parts:
                return await self._stream(parts, send)
        async with decoding(services.backend, plan, observer, services.drain) as blocks:
            received = [block async for block in blocks]
            whole = await in_thread_if(answer.is_long(received), partial(answer.answer, received))
        await self._send_start(send, b"application/json", len(whole))
        await send({"type": "http.response.body", "body": whole, "more_body": False})
        return None

    async def _events(
        self, plan: GenerationPlan, answer: AnswerFormat[Any], observer: RequestObserver
    ) -> AsyncGenerator[bytes, None]:
        services = self._services
        async with decoding(services.backend, plan, observer, services.drain) as blocks:
            async for block in blocks:
                write = partial(answer.on_block, block)
                for chunk in await in_thread_if(answer.is_long([block]), write):
                    yield chunk
        for chunk in await in_thread_if(answer.wanted.detailed_metrics, answer.at_end):
            yield chunk
        yield b"[DONE]"

    async def _stream(self, parts: AsyncGenerator[bytes, None], send: Send) -> Exception | None:
        first = await anext(parts)
        await self._send_start(send, b"text/event-stream; charset=utf-8", None)
        failure: Exception | None = None
        try:
            await _send_part(send, first)
            async for part in parts:
                await _send_part(send, part)
        except ClientDisconnected:
            raise
        except OSError as gone:
            # Servers of newer ASGI versions raise when the client has gone.
            raise ClientDisconnected from gone
        except Exception as error:  # noqa: BLE001
            # Whatever it is, the client must be told and the stream closed.
            logger.warning("%s ended early: %s", self._request_id, for_log(error))
            failure = error
            last = as_event(to_http(error).to_json())
            await _send_part(send, padded(last, self._services.config.stream_pad_bytes))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return failure

    async def _send_start(self, send: Send, media_type: bytes, length: int | None) -> None:
        headers = [(b"content-type", media_type), (b"x-request-id", self._header_id.encode())]
        if length is None:
            # Proxies must pass every event on at once.
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})


def client_id(headers: Headers) -> str:
    """Return the client's own X-Request-Id; empty without one that is fit for logs and headers."""
    given = headers.get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else ""


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
