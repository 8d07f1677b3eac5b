"""A service's own /metrics, for Prometheus. Knows HTTP and a registry; knows no service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specserve.config import ServerConfig
from specserve.errors import ConfigurationError
from specserve.model.messages import EngineLoad, OutcomeCounts


class LoadCollector(Collector):
    """A replica's load, read when it is scraped."""

    def __init__(self, role: str, load: Callable[[], EngineLoad]) -> None:
        self._role = role
        self._load = load

    def collect(self) -> Iterable[Metric]:
        """Give the present load as gauges."""
        load = self._load()
        used = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
        gauges = {
            "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", used),
            "num_kv_blocks": ("KV blocks in the pool {block}", load.num_blocks),
            "num_free_kv_blocks": ("KV blocks not in use {block}", load.num_free_blocks),
            "num_sessions": ("Sessions held {session}", load.num_sessions),
            "num_requests_waiting": ("Calls before their first forward {call}", load.num_waiting),
            "queue_seconds": ("Wait of calls for their first forward, of late s", load.queue_s),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(f"specserve_{name}", text, labels=["role"])
            family.add_metric([self._role], value)
            yield family
        iterations = CounterMetricFamily(
            "specserve_device_iterations", "Device iterations {iteration}", labels=["role"]
        )
        iterations.add_metric([self._role], load.num_iterations)
        yield iterations
        busy = CounterMetricFamily(
            "specserve_device_busy_seconds", "Time of forwards s", labels=["role"]
        )
        busy.add_metric([self._role], load.busy_s)
        yield busy
        if load.outcomes is not None:
            yield from _outcome_counters(self._role, load.outcomes)


def _outcome_counters(role: str, counts: OutcomeCounts) -> Iterable[Metric]:
    """Give what the outcome cache did; the hit rate is hits / (hits + misses)."""
    counters = {
        "outcome_cache_hits": (
            "Propose calls answered with tokens drafted before they came {call}",
            counts.num_hits,
        ),
        "outcome_cache_misses": (
            "Propose calls looked ahead of for which nothing was found {call}",
            counts.num_misses,
        ),
        "outcome_cache_hidden_tokens": (
            "Draft tokens answered that were drafted before their call came {token}",
            counts.num_hidden_tokens,
        ),
        "outcome_cache_branch_tokens": (
            "Draft tokens drafted ahead, of use or not {token}",
            counts.num_branch_tokens,
        ),
        "outcome_cache_hidden_seconds": (
            "Forward time of the hidden tokens, which their calls did not wait for s",
            counts.hidden_s,
        ),
        "outcome_cache_asked_seconds": (
            "Forward time that hits and misses waited for all the same s",
            counts.asked_s,
        ),
    }
    for name, (text, value) in counters.items():
        family = CounterMetricFamily(f"specserve_{name}", text, labels=["role"])
        family.add_metric([role], value)
        yield family


class MetricsEndpoint:
    """A small HTTP server in a thread of its own."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    @classmethod
    def start(cls, config: ServerConfig, registry: CollectorRegistry) -> MetricsEndpoint | None:
        """Serve the registry on the configured port; None when none is configured.

        Raises:
            ConfigurationError: the port is taken.
        """
        if config.metrics_port is None:
            return None
        try:
            server, thread = start_http_server(config.metrics_port, config.host, registry)
        except OSError as error:
            raise ConfigurationError(
                f"metrics_port: cannot bind {config.host}:{config.metrics_port}: {error.strerror}"
            ) from error
        return cls(server, thread)

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_port)

    async def stop(self) -> None:
        """Stop serving, off the event loop: it waits for a scrape under way."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)
