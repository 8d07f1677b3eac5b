"""What the length control knows, as gauges, read when they are scraped.

Labels are of fixed sets: no replica, tenant or request is among them. Knows the control and
Prometheus; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specserve.config import MAX_NUM_SPECULATIVE_TOKENS
from specserve.orchestrator.length_control import LengthControl
from specserve.speculation.length_choice import SpeculationMode

PREFIX = "specserve_orchestrator"


class LengthCollector(Collector):
    """The state of the switch, learned costs and learned acceptance."""

    def __init__(self, length: LengthControl, is_enabled: Callable[[], bool]) -> None:
        """Collect from a control.

        Args:
            is_enabled: whether a round could speculate now: the switch and the draft allow it.
        """
        self._length = length
        self._is_enabled = is_enabled

    def collect(self) -> Iterable[Metric]:
        """Give everything as of now."""
        yield _gauge(
            "speculation_enabled", "Whether rounds may speculate, 0 or 1", self._is_enabled()
        )
        mode = GaugeMetricFamily(
            f"{PREFIX}_speculation_mode", "1 for how K is chosen at present", labels=["mode"]
        )
        for known in SpeculationMode:
            mode.add_metric([known], known is self._length.mode)
        yield mode
        yield from self._costs()
        yield from self._acceptance()

    def _costs(self) -> Iterable[Metric]:
        parts = GaugeMetricFamily(
            f"{PREFIX}_learned_cost_seconds",
            "Learned cost of a part of a round s",
            labels=["method", "part"],
        )
        rounds = GaugeMetricFamily(
            f"{PREFIX}_learned_round_seconds",
            "Expected time of a round under the latest load s",
            labels=["method", "num_speculative_tokens"],
        )
        tokens = GaugeMetricFamily(
            f"{PREFIX}_learned_round_tokens",
            "Expected tokens of a round {token}",
            labels=["method", "num_speculative_tokens"],
        )
        credit = GaugeMetricFamily(
            f"{PREFIX}_probe_credit_seconds",
            "Session time that probing may lose at present s",
            labels=["method"],
        )
        for method, pool in self._length.pools.items():
            costs = pool.costs
            for part, seconds in {
                "draft_token": costs.draft.seconds(1, 1),
                "draft_call": costs.draft.call_s.value(),
                "verify": costs.curve.seconds(1),
                "round": costs.round_s.value(),
                "decode_ahead_call": costs.plain_call_s.value(),
                "decode_ahead_token": costs.plain_token_s.value(),
            }.items():
                parts.add_metric([method, part], seconds)
            for k, option in enumerate(self._length.estimates(method)):
                rounds.add_metric([method, str(k)], option.seconds)
                tokens.add_metric([method, str(k)], option.num_tokens)
            credit.add_metric([method], pool.budget.credit_s)
        yield from (parts, rounds, tokens, credit)

    def _acceptance(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            f"{PREFIX}_learned_acceptance_rate",
            "Share of rounds that accept a position, of those that got so far and ask for it",
            labels=["method", "rule", "position"],
        )
        max_k = min(self._length.speculative.num_speculative_tokens, MAX_NUM_SPECULATIVE_TOKENS)
        for (method, rule), pool in self._length.acceptances.items():
            for position, rate in enumerate(pool.rates(max_k).accepted):
                family.add_metric([method, rule, str(position)], rate)
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text)
    family.add_metric([], float(value))
    return family
