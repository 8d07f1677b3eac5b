"""What an orchestrator itself costs: its processor time, and the rounds it was spent on.

The first over the second, as rates, is the processor time of a session-round: the number that says
how many orchestrators a load needs. Knows two numbers; knows no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PREFIX = "specserve_orchestrator"


class ProcessCollector(Collector):
    """Processor seconds, rounds and requests, read when they are scraped."""

    def __init__(
        self,
        num_rounds: Callable[[], int],
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
    ) -> None:
        self._num_rounds = num_rounds
        self._num_running = num_running
        self._num_waiting = num_waiting

    def collect(self) -> Iterable[Metric]:
        """Give everything as of now."""
        seconds = CounterMetricFamily(f"{PREFIX}_cpu_seconds", "Processor time of this process s")
        seconds.add_metric([], time.process_time())
        rounds = CounterMetricFamily(f"{PREFIX}_num_rounds", "Rounds of all sessions {round}")
        rounds.add_metric([], self._num_rounds())
        running = GaugeMetricFamily(
            f"{PREFIX}_num_requests_running", "Choices that hold or look for a target {request}"
        )
        running.add_metric([], self._num_running())
        waiting = GaugeMetricFamily(
            f"{PREFIX}_num_requests_waiting", "Choices that were not admitted yet {request}"
        )
        waiting.add_metric([], self._num_waiting())
        yield from (seconds, rounds, running, waiting)
