"""Each plain service's own /metrics."""

from __future__ import annotations

import asyncio
import urllib.request

from specserve.config import EngineConfig, ServerConfig, TargetConfig
from specserve.rpc.metrics_endpoint import MetricsEndpoint
from specserve.target.server import start_target


async def test_a_service_exports_its_load_where_a_port_is_given() -> None:
    """The gauges of a fresh target: nothing in use, no session."""
    config = TargetConfig(
        engine=EngineConfig(model="toy:vocab_size=32", num_kv_blocks=8, device_mode="thread"),
        server=ServerConfig(metrics_port=0),
    )
    target = await start_target(config)
    try:
        endpoint = target.metrics
        assert isinstance(endpoint, MetricsEndpoint)
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        text = await asyncio.to_thread(_read, url)
    finally:
        await target.stop()

    assert 'specserve_num_kv_blocks{role="target"} 8.0' in text
    assert 'specserve_num_free_kv_blocks{role="target"} 8.0' in text
    assert 'specserve_kv_cache_usage_perc{role="target"} 0.0' in text
    assert 'specserve_num_sessions{role="target"} 0.0' in text


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - our own port
        return str(response.read(), "utf-8")
