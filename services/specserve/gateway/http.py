"""The HTTP application: OpenAI's endpoints, probes and metrics.

Knows routes and how errors are answered; knows neither Ray nor how a request reaches a model.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from specserve.errors import SpecServeError, quoted
from specserve.gateway.answering import GenerationAnswer, Services
from specserve.gateway.answers import (
    Alive,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelCard,
    ModelList,
    PairReadiness,
    Readiness,
)
from specserve.gateway.authentication import Authentication, open_paths, watched_keys
from specserve.gateway.backend import GenerationBackend
from specserve.gateway.config import GatewayConfig
from specserve.gateway.console import add_console
from specserve.gateway.drain import Drain
from specserve.gateway.endpoints import chat_endpoint, completion_endpoint
from specserve.gateway.errors import (
    BodyTooLarge,
    BodyTooSlow,
    HttpError,
    UnknownModel,
    for_log,
    routing_error,
    statuses,
    to_http,
)
from specserve.gateway.limits import Limiter
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.openapi import complete_document, errors, generation_body, streamed
from specserve.gateway.pair import PairWatch, ServedPair
from specserve.gateway.pool_view import add_pool_route
from specserve.gateway.receiving import Refusal
from specserve.gateway.replica_gauges import refresh_gauges
from specserve.gateway.request_routes import add_request_routes
from specserve.gateway.requests import ChatRequest, CompletionRequest
from specserve.gateway.token_routes import BODIES, add_token_routes
from specserve.gateway.token_text import TokenTexts
from specserve.grammar.compiler import GrammarCompiler
from specserve.telemetry import Tracing

if TYPE_CHECKING:  # it brings the tokenizer library along, which a fake does not need
    from specserve.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

GENERATION_ERRORS = tuple(statuses())
"""Statuses of both endpoints besides 200."""


def create_http_app(
    backend: GenerationBackend,
    tokenizer: Tokenizer,
    config: GatewayConfig,
    metrics: GatewayMetrics | None = None,
    tracing: Tracing | None = None,
    drain: Drain | None = None,
) -> FastAPI:
    """Build the application.

    Args:
        backend: decodes; the caller closes it.
        tokenizer: the target's.
        config: limits and names; host and port are the server's affair.
        metrics: where to count; None makes a registry of its own.
        tracing: where spans go; None exports none.
        drain: how whoever serves the application stops it; None if nobody does with grace.

    Raises:
        ConfigurationError: the file of API keys cannot be read.
    """
    metrics = metrics or GatewayMetrics()
    drain = drain or Drain()
    table = tokenizer.token_table()
    pair = PairWatch(backend, config.served_model_name, config.pair_refresh_s, table.fingerprint)
    tracing = tracing or Tracing()
    tracing.export_metrics(metrics.registry)
    limiter = Limiter()
    services = Services(backend, pair, config, drain, limiter, metrics, tracing)
    texts = TokenTexts(table)
    grammars = GrammarCompiler(lambda: table)
    completion = completion_endpoint(tokenizer, config, texts, grammars)
    chat = chat_endpoint(tokenizer, config, texts, grammars)
    started_at = int(time.time())
    # Another spelling of a path is not that path: redirects would go round path-based guards.
    app = FastAPI(title="specserve", redirect_slashes=False, docs_url=None, redoc_url=None)
    _answer_errors(app)
    if (keys := watched_keys(config)) is not None:
        app.add_middleware(
            Authentication, keys=keys, metrics=metrics, open_paths=open_paths(config)
        )

    @app.post(
        "/v1/completions",
        responses={
            200: {"model": Completion, "content": streamed(Completion)},
            **errors(*GENERATION_ERRORS),
        },
        openapi_extra=generation_body(CompletionRequest),
    )
    async def completions() -> Response:
        """Continue a text."""
        return GenerationAnswer(completion, services)

    @app.post(
        "/v1/chat/completions",
        responses={
            200: {"model": ChatCompletion, "content": streamed(ChatCompletionChunk)},
            **errors(*GENERATION_ERRORS),
        },
        openapi_extra=generation_body(ChatRequest),
    )
    async def chat_completions() -> Response:
        """Say what the assistant says next."""
        return GenerationAnswer(chat, services)

    @app.get("/v1/models", responses=errors(503))
    async def models() -> ModelList:
        """List the served model."""
        served = await pair.ready()
        return ModelList(data=[_model_card(served, started_at)])

    @app.get("/v1/models/{name:path}", responses=errors(404, 503))
    async def model(name: str) -> ModelCard:
        """Describe one model."""
        served = await pair.ready()
        if name != served.model:
            raise UnknownModel(name, served.model)
        return _model_card(served, started_at)

    @app.get("/health")
    async def health() -> Alive:
        """Say that the process is alive; asks nobody."""
        return Alive()

    @app.get(
        "/ready",
        response_model=None,
        responses={
            200: {"model": PairReadiness},
            503: {"model": PairReadiness | Readiness, "description": "Not ready."},
        },
    )
    async def ready() -> JSONResponse:
        """Say whether requests are taken and a compatible pair is loaded."""
        answer = await _readiness(pair, drain)
        return JSONResponse(answer.model_dump(), 200 if answer.ready else 503)

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def prometheus(request: Request) -> Response:
        """Return all metrics in Prometheus' text format, or as OpenMetrics where that is taken."""
        await refresh_gauges(backend, metrics)
        text, content_type = metrics.render_for(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    if config.console:
        add_console(app)
        add_pool_route(app, backend, metrics)
    add_token_routes(app, tokenizer, pair, config, limiter)
    if config.show_recent_requests:
        add_request_routes(app, backend, config)
    complete_document(
        app,
        (CompletionRequest, ChatRequest, *BODIES),
        (Completion, ChatCompletionChunk),
        config,
        None if keys is None else open_paths(config),
    )
    return app


def _model_card(served: ServedPair, created: int) -> ModelCard:
    return ModelCard(id=served.model, created=created, max_model_len=served.max_model_len)


async def _readiness(pair: PairWatch, drain: Drain) -> Readiness:
    if drain.is_draining:
        return Readiness(ready=False, reason=to_http(drain.error()).message)
    try:
        answer = await pair.refresh()
    except SpecServeError as error:
        return Readiness(ready=False, reason=to_http(error).message)
    mismatch = pair.mismatch(answer)
    is_ready = answer.ready and not mismatch
    reason = mismatch or answer.reason
    return PairReadiness(
        ready=is_ready,
        reason=reason or ("" if is_ready else "the model pair is still being loaded"),
        target=answer.target.model_id or None,
        draft=answer.draft.model_id or None,
        speculation_enabled=answer.speculation_enabled,
        num_speculative_tokens=answer.num_speculative_tokens,
        lossless=not answer.synthetic_acceptance_rates,
    )


def _answer_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's shape."""

    async def refused(request: Request, error: Exception) -> Any:
        answer = to_http(error)
        # Only requests for text have an id; others are polls, and PairWatch tells what they meet.
        if answer.status >= 500 and (request_id := _request_id(request)):
            logger.warning("%s failed: %s", request_id, for_log(error))
        is_unread = isinstance(error, BodyTooLarge | BodyTooSlow)
        return Refusal(answer) if is_unread else _response(request, answer)

    async def misrouted(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return _response(request, routing_error(status, request.url.path, request.method))

    async def unforeseen(request: Request, error: Exception) -> Response:
        name = _request_id(request) or f"{request.method} {quoted(request.url.path)}"
        logger.error("%s failed: %s", name, for_log(error))
        return _response(request, to_http(error))

    app.add_exception_handler(SpecServeError, refused)
    app.add_exception_handler(HTTPException, misrouted)
    app.add_exception_handler(Exception, unforeseen)


def _request_id(request: Request) -> str:
    return str(getattr(request.state, "request_id", ""))


def _response(request: Request, error: HttpError) -> Response:
    headers = error.headers
    if request_id := _request_id(request):
        headers["x-request-id"] = request_id
    return Response(error.to_json(), error.status, headers, "application/json")
