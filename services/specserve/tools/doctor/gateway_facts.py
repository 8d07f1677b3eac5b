"""What a running gateway tells of itself and its pair: pool, recent rounds, counters.

Asks the public endpoints alone. Knows HTTP and the shapes of the answers; judges nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specserve.errors import ConfigurationError, PeerUnavailable
from specserve.gateway.pool_view import PoolView
from specserve.rpc.request_view import RequestView

READ_TIMEOUT_S = 10.0
MAX_LISTED = 200
MAX_SPECULATING = 24
"""Latest requests with draft tokens whose rounds are read."""
MAX_WITHOUT = 8
"""The same for those without."""

FAILURES = "specserve_request_failure_total"


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """One gateway, as of now."""

    ready: dict[str, Any]
    """What /ready answers."""
    pool: PoolView | None
    """None where the console is off."""
    requests: tuple[RequestView, ...] | None
    """Finished ones with their rounds, the oldest first; None where they are not shown."""
    failures: dict[str, int]
    """{class of the error: requests} since the gateway's start."""


async def read_facts(client: httpx.AsyncClient, ids: tuple[str, ...] = ()) -> GatewayFacts:
    """Ask for everything.

    Args:
        ids: requests to read; without any, the latest finished ones.

    Raises:
        PeerUnavailable: nobody answers, or somebody who is no specserve.
        ConfigurationError: a key is wanted, or another one.
    """
    health = await _get(client, "/health")
    if not isinstance(health, dict) or health.get("service") != "specserve":
        raise PeerUnavailable("gateway", f"{client.base_url}: what answers there is no specserve")
    ready = await _get(client, "/ready")
    pool = await _get(client, "/v1/specserve/pool")
    return GatewayFacts(
        ready=ready if isinstance(ready, dict) else {},
        pool=None if pool is None else PoolView.model_validate(pool),
        requests=await _requests(client, ids),
        failures=await _failures(client),
    )


async def _requests(
    client: httpx.AsyncClient, ids: tuple[str, ...]
) -> tuple[RequestView, ...] | None:
    listed = await _get(client, f"/v1/specserve/requests?limit={MAX_LISTED}")
    if listed is None:
        return None
    if not ids:
        latest = [one for one in listed["requests"] if one["state"] == "finished"]
        speculating = [one["request_id"] for one in latest if one["num_draft_tokens"]]
        without = [one["request_id"] for one in latest if not one["num_draft_tokens"]]
        ids = (*speculating[:MAX_SPECULATING], *without[:MAX_WITHOUT])
    views = []
    for name in dict.fromkeys(ids):
        # One may be forgotten between the list and this.
        found = await _get(client, f"/v1/specserve/requests/{name}") or {"requests": []}
        views += [RequestView.model_validate(one) for one in found["requests"]]
    return tuple(sorted(views, key=lambda view: view.arrived_unix_s))


async def _failures(client: httpx.AsyncClient) -> dict[str, int]:
    text = await _get(client, "/metrics")
    counts: dict[str, int] = defaultdict(int)
    for family in text_string_to_metric_families(text if isinstance(text, str) else ""):
        for sample in family.samples:
            if sample.name == FAILURES and sample.value:
                counts[sample.labels["error"]] += int(sample.value)
    return dict(counts)


async def _get(client: httpx.AsyncClient, path: str) -> Any:
    """Return the body, parsed where it is JSON; None where there is no such path."""
    url = str(client.base_url)
    try:
        answer = await client.get(path, timeout=READ_TIMEOUT_S)
        is_json = "json" in answer.headers.get("content-type", "")
        body = answer.json() if is_json else answer.text
    except httpx.UnsupportedProtocol as error:
        raise ConfigurationError(f"--running: {url}: {error}") from error
    except (httpx.HTTPError, ValueError) as error:
        raise PeerUnavailable("gateway", f"{url}: {str(error) or type(error).__name__}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        said = body["error"]["message"] if isinstance(body, dict) and "error" in body else "401"
        raise ConfigurationError(f"--api-key-from: {url}: {said}")
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    if answer.status_code != httpx.codes.OK and path != "/ready":
        raise PeerUnavailable("gateway", f"{url}{path}: status {answer.status_code}")
    return body
