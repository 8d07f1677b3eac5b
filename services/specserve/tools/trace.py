"""`specserve trace [REQUEST_ID]`: where a request's time went, from what orchestrators remember.

Asks a gateway over HTTP, or orchestrators over gRPC where the gateway shows nothing or is in
doubt. Knows addresses; the drawing is `waterfall.py`'s.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specserve.errors import ConfigurationError, PeerUnavailable, quoted
from specserve.tools.client_access import (
    add_key_flag,
    add_tls_flags,
    check_access,
    key_headers,
    tls_of,
)
from specserve.tools.speculation import resolve
from specserve.tools.terminal import say, table

if TYPE_CHECKING:
    from specserve.rpc.request_view import RequestView
    from specserve.rpc.tls import MutualTls

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
PATH = "/v1/specserve/requests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve trace`."""
    parser.add_argument(
        "request_id",
        nargs="?",
        metavar="REQUEST_ID",
        help="id of the answer, X-Request-Id or trace id; without it the latest are listed",
    )
    parser.add_argument("--url", metavar="URL", help=f"a gateway (default: {DEFAULT_URL})")
    parser.add_argument(
        "--orchestrator-address",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="ask an orchestrator instead; give it once per orchestrator, or name a host that "
        "stands for all of them",
    )
    add_key_flag(parser)
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="without an id: most requests listed"
    )
    add_tls_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and write; 1 when nobody remembers the request."""
    from specserve.tools.waterfall import lines_of

    check_access(args, DEFAULT_URL)
    if not 1 <= args.limit <= 200:
        raise ConfigurationError(f"--limit: found {args.limit}, wanted 1 to 200")
    views = _ask(args)
    if not args.request_id:
        say(_list(views))
        return 0
    if not views:
        raise PeerUnavailable(
            "orchestrator", f"{quoted(args.request_id)} is not remembered, or no more"
        )
    for number, view in enumerate(views):
        say("\n" * (number > 0) + "\n".join(lines_of(view)))
    return 0


def _ask(args: argparse.Namespace) -> list[RequestView]:
    if args.orchestrator_address:
        addresses = [one for given in args.orchestrator_address for one in resolve(given)]
        return asyncio.run(ask_orchestrators(addresses, args.request_id, args.limit, tls_of(args)))
    url = args.url or DEFAULT_URL
    return ask_gateway(url, args.request_id, args.limit, key_headers(args.api_key_from))


def ask_gateway(
    url: str, request_id: str | None, limit: int, headers: dict[str, str]
) -> list[RequestView]:
    """Ask a gateway for one request, or for the latest.

    Raises:
        PeerUnavailable: it does not answer, or shows none; says which.
    """
    import httpx

    from specserve.rpc.request_view import RequestView

    target = f"{url.rstrip('/')}{PATH}" + (f"/{request_id}" if request_id else "")
    try:
        params = None if request_id else {"limit": limit}
        answer = httpx.get(target, params=params, headers=headers, timeout=TIMEOUT_S)
        body: Any = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise PeerUnavailable("gateway", f"{url}: {error}") from error
    if answer.status_code == 404 and isinstance(body, dict):
        refusal = body.get("error")
        if isinstance(refusal, dict) and refusal.get("code") == "request_not_found":
            return []
        raise PeerUnavailable(
            "gateway", f"{url} does not show requests: ask with --orchestrator-address"
        )
    if answer.status_code != 200:
        raise PeerUnavailable("gateway", f"{url}: status {answer.status_code}")
    return [RequestView.model_validate(one) for one in body["requests"]]


async def ask_orchestrators(
    addresses: Sequence[str], request_id: str | None, limit: int, tls: MutualTls | None
) -> list[RequestView]:
    """Ask orchestrators for one request, or for the latest.

    Raises:
        PeerUnavailable: one does not answer.
    """
    from specserve.rpc.request_view import view_of

    answers = await asyncio.gather(*(_ask_one(one, request_id, limit, tls) for one in addresses))
    records = sorted(
        (record for answer in answers for record in answer), key=lambda one: one.arrived_unix_s
    )
    return [view_of(one) for one in (records if request_id else reversed(records))]


async def _ask_one(
    address: str, request_id: str | None, limit: int, tls: MutualTls | None
) -> list[Any]:
    import grpc

    from specserve.rpc.channel import open_channel
    from specserve.rpc.v1 import requests_pb2, requests_pb2_grpc

    async with open_channel(address, tls) as channel:
        stub = requests_pb2_grpc.RecentRequestsServiceStub(channel)
        try:
            if request_id:
                found = await stub.GetRequests(
                    requests_pb2.GetRequestsRequest(id=request_id), timeout=TIMEOUT_S
                )
            else:
                found = await stub.ListRequests(
                    requests_pb2.ListRequestsRequest(limit=limit), timeout=TIMEOUT_S
                )
        except grpc.aio.AioRpcError as error:
            raise PeerUnavailable(
                "orchestrator", f"{address}: {error.code().name}: {error.details()}"
            ) from error
    return list(found.requests)


def _list(views: Sequence[RequestView]) -> str:
    if not views:
        return "no request is remembered"
    rows = [
        (
            view.request_id,
            view.state,
            str(view.prompt_length),
            str(view.num_output_tokens),
            str(view.num_rounds),
            f"{1e3 * view.total_s:.0f}",
            f"{view.num_accepted_draft_tokens}/{view.num_draft_tokens}",
            view.trace_id,
        )
        for view in views
    ]
    header = ("request", "state", "prompt", "output", "rounds", "ms", "accepted", "trace")
    return table(header, rows)
