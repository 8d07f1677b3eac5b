"""What a bundle takes from services that run: a gateway by URL, orchestrators and metrics ports.

Everything asked for is counts, times and names; nothing here could ask for a prompt or an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specserve.errors import PeerUnavailable
from specserve.tools import trace
from specserve.tools.speculation import ask_all
from specserve.tools.support_bundle.collection import Collection

if TYPE_CHECKING:
    import httpx

    from specserve.rpc.tls import MutualTls

TIMEOUT_S = 10.0
MAX_METRICS_CHARACTERS = 8 << 20
"""More is no /metrics of ours."""


def take_gateway(
    found: Collection, url: str, headers: Mapping[str, str], num_requests: int
) -> None:
    """Ask a gateway; one that does not answer at all is one line."""
    # Who is not ready says why, with another status.
    ready = found.take("gateway/ready.json", lambda: _json(url, "/ready", {}, any_status=True))
    if ready is None:
        return
    from specserve.tools.doctor.running import examine_running

    found.take("gateway/metrics.txt", lambda: _metrics(f"{url.rstrip('/')}/metrics", headers))
    found.take("gateway/pool.json", lambda: _json(url, "/v1/specserve/pool", headers))

    found.take("gateway/doctor.json", lambda: examine_running(url, headers, 0).as_json())

    def requests() -> list[Any]:
        latest = trace.ask_gateway(url, None, num_requests, dict(headers))
        names = dict.fromkeys(view.request_id for view in latest)
        views = [one for name in names for one in trace.ask_gateway(url, name, 1, dict(headers))]
        return [view.model_dump(mode="json") for view in views]

    found.take("gateway/requests.json", requests)


def take_orchestrator(
    found: Collection, number: int, address: str, tls: MutualTls | None, num_requests: int
) -> None:
    """Ask one orchestrator; one that does not answer at all is one line."""
    folder = f"orchestrator-{number}"
    status = found.take(f"{folder}/status.json", lambda: asyncio.run(_status(address, tls)))
    if status is None:
        return
    found.take(f"{folder}/speculation.json", lambda: asyncio.run(_speculation(address, tls)))
    found.take(
        f"{folder}/requests.json", lambda: asyncio.run(_requests(address, tls, num_requests))
    )


def take_metrics(found: Collection, number: int, url: str) -> None:
    """Read one more metrics port; the services behind a gateway want no key."""
    found.take(f"metrics-{number}.txt", lambda: f"# {url}\n" + _metrics(url, {}))


def _metrics(url: str, headers: Mapping[str, str]) -> str:
    text = _get(url, headers).text
    if len(text) > MAX_METRICS_CHARACTERS:
        raise PeerUnavailable(url, f"{len(text)} characters, no more than 8 Mi were wanted")
    return text


def _json(url: str, path: str, headers: Mapping[str, str], *, any_status: bool = False) -> Any:
    target = url.rstrip("/") + path
    try:
        return _get(target, headers, any_status=any_status).json()
    except ValueError as error:
        raise PeerUnavailable(target, "no JSON: is it a gateway?") from error


def _get(url: str, headers: Mapping[str, str], *, any_status: bool = False) -> httpx.Response:
    import httpx

    try:
        answer = httpx.get(url, headers=dict(headers), timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PeerUnavailable(url, str(error) or type(error).__name__) from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise PeerUnavailable(url, "status 401: it wants a key that is right; --api-key-from")
    if not answer.is_success and not any_status:
        raise PeerUnavailable(url, f"status {answer.status_code}")
    return answer


async def _status(address: str, tls: MutualTls | None) -> dict[str, Any]:
    import grpc
    from google.protobuf.json_format import MessageToDict

    from specserve.rpc.channel import open_channel
    from specserve.rpc.v1 import generation_pb2, generation_pb2_grpc

    async with open_channel(address, tls) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        try:
            status = await stub.GetStatus(generation_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
            pair = await stub.GetPair(generation_pb2.GetPairRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise PeerUnavailable(
                "orchestrator", f"{address}: {error.code().name}: {error.details()}"
            ) from error
    return {"address": address, "status": MessageToDict(status), "pair": MessageToDict(pair)}


async def _speculation(address: str, tls: MutualTls | None) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    (state,) = await ask_all([address], None, tls)
    if isinstance(state, str):
        raise PeerUnavailable("orchestrator", f"{address}: {state}")
    return MessageToDict(state)


async def _requests(address: str, tls: MutualTls | None, num_requests: int) -> list[Any]:
    latest = await trace.ask_orchestrators([address], None, num_requests, tls)
    names = dict.fromkeys(view.request_id for view in latest)
    views = [
        one for name in names for one in await trace.ask_orchestrators([address], name, 1, tls)
    ]
    return [view.model_dump(mode="json") for view in views]
