"""What pushed metrics say of replicas, where nobody scrapes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from helpers.waiting import eventually
from specserve.errors import PeerUnavailable
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.replica_gauges import keep_gauges
from specserve.rpc.v1 import common_pb2, generation_pb2

WAITING = "specserve_num_requests_waiting"


class Orchestrators:
    """Answer with so many waiting requests, or not at all."""

    def __init__(self) -> None:
        self.num_waiting: int | None = 3
        self.num_asked = 0

    async def get_status(self) -> list[generation_pb2.GetStatusResponse]:
        self.num_asked += 1
        if self.num_waiting is None:
            raise PeerUnavailable("orchestrator", "none is known")
        replica = generation_pb2.ReplicaStatus(
            role="target", replica_id="a", load=common_pb2.Load(num_blocks=4, num_free_blocks=1)
        )
        status = generation_pb2.GetStatusResponse(num_waiting=self.num_waiting, replicas=[replica])
        return [status]


async def test_gauges_of_replicas_need_no_scrape() -> None:
    """They follow the orchestrators, and vanish with them."""
    backend, metrics = Orchestrators(), GatewayMetrics()
    keeping = asyncio.create_task(keep_gauges(cast(Any, backend), metrics, period_s=0.0))
    read = metrics.registry.get_sample_value
    labels = {"role": "target", "replica": "a"}
    await eventually(lambda: read("specserve_kv_cache_usage_perc", labels) == 0.75)
    assert read(WAITING) == 3
    backend.num_waiting = None
    await eventually(lambda: read("specserve_kv_cache_usage_perc", labels) is None)
    asked = backend.num_asked
    await eventually(lambda: backend.num_asked > asked)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
