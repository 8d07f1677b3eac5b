"""The gauges of replicas, as orchestrators tell of them: before a scrape, and before a push.

Knows the backend and the metrics; counts nothing.
"""

from __future__ import annotations

import asyncio

from specserve.errors import SpecServeError
from specserve.gateway.backend import GenerationBackend
from specserve.gateway.metrics import GatewayMetrics

STATUS_TIMEOUT_S = 1.0
"""Longest that orchestrators are waited for; without them their gauges are missing."""

PUSH_PERIOD_S = 15.0
"""Between two looks where metrics are pushed: nobody says when they are read."""


async def refresh_gauges(backend: GenerationBackend, metrics: GatewayMetrics) -> None:
    """Ask the orchestrators, and set the gauges by what they answer; none of those that do not."""
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            statuses = await backend.get_status()
    except (SpecServeError, TimeoutError):
        statuses = []
    metrics.set_replicas(statuses)


async def keep_gauges(
    backend: GenerationBackend, metrics: GatewayMetrics, period_s: float = PUSH_PERIOD_S
) -> None:
    """Go on refreshing them, until cancelled."""
    while True:
        await refresh_gauges(backend, metrics)
        await asyncio.sleep(period_s)
