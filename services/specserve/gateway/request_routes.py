"""`/v1/specserve/requests`: what the orchestrators remember of recent requests, for people.

Knows the backend and shapes; lengths, counts and times only, no text.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from specserve.errors import InvalidRequest, quoted
from specserve.gateway.answers import Answer
from specserve.gateway.backend import GenerationBackend
from specserve.gateway.config import GatewayConfig
from specserve.gateway.errors import UnknownRequest
from specserve.gateway.openapi import errors
from specserve.gateway.tenants import key_tenant, resolve_tenant
from specserve.rpc.request_view import RequestView, view_of
from specserve.rpc.v1.requests_pb2 import RequestRecord

PATH = "/v1/specserve/requests"

DEFAULT_LIMIT = 20
MAX_LIMIT = 200

MAX_LISTED = 1000
"""Entries that are looked through for those of one tenant."""


class RecentRequestList(Answer):
    """The latest requests, newest first, without their rounds."""

    requests: list[RequestView]
    """One entry per choice."""


class RequestDetails(Answer):
    """Every choice of one request, with its rounds."""

    id: str
    """What was asked for."""
    requests: list[RequestView]
    """One entry per choice, and per attempt where an orchestrator was lost."""


def add_request_routes(app: FastAPI, backend: GenerationBackend, config: GatewayConfig) -> None:
    """Add both routes. Everybody sees their own tenant's requests."""

    def own(request: Request, records: list[RequestRecord]) -> list[RequestView]:
        tenant = resolve_tenant(request.headers, config, key_tenant(request.scope))
        return [view_of(record) for record in records if record.tenant_salt == tenant.salt]

    @app.get(
        PATH,
        responses={200: {"model": RecentRequestList}, **errors(400)},
        openapi_extra={"parameters": [_LIMIT]},
    )
    async def recent_requests(request: Request) -> Response:
        """List the latest requests, newest first: one entry per choice."""
        limit = _limit(request.query_params.get("limit"))
        # Others' requests are left out, so that more are asked for.
        records = await backend.list_requests(MAX_LISTED)
        return _json(RecentRequestList(requests=own(request, records)[:limit]))

    @app.get(PATH + "/{request_id}", responses={200: {"model": RequestDetails}, **errors(404)})
    async def recent_request(request: Request, request_id: str) -> Response:
        """Answer one request's rounds and calls; known by its id, X-Request-Id or trace id."""
        views = own(request, await backend.get_requests(request_id))
        if not views:
            raise UnknownRequest(request_id)
        return _json(RequestDetails(id=request_id, requests=views))


_LIMIT = {
    "name": "limit",
    "in": "query",
    "description": "Most entries.",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
}


def _limit(text: str | None) -> int:
    """Read the limit.

    Raises:
        InvalidRequest: it is no number in its range.
    """
    if text is None:
        return DEFAULT_LIMIT
    # Longer ones are slow to read, and out of range anyway.
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest("limit", f"{quoted(text)}, 1 to {MAX_LIMIT} was wanted")
    return limit


def _json(answer: Answer) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
