"""What the configured method's records say about the served pair, for people and for metrics.

Knows the gate and the pair; knows no request.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specserve.orchestrator.pair import Pair
from specserve.orchestrator.verified_gate import VerifiedGate
from specserve.speculation.types import AcceptanceRule


class PairVerification:
    """The gate's verdicts on what the orchestrator serves at present."""

    def __init__(self, gate: VerifiedGate, pair: Pair) -> None:
        self._gate = gate
        self._pair = pair

    def refusals(self) -> dict[AcceptanceRule, str]:
        """Give the verdict of every rule; empty where no record is required."""
        if self._pair.method is None:
            return {}
        return self._gate.refusals(self._pair.method, *self._pair.models())

    @property
    def may_speculate(self) -> bool:
        """Whether requests of at least one rule may."""
        refusals = self.refusals()
        return not refusals or not all(refusals.values())

    def reason(self) -> str:
        """Say what is served target-only for want of a record; empty where nothing is."""
        refusals = self.refusals()
        refused = {rule: why for rule, why in refusals.items() if why}
        if not refused:
            return ""
        if len(refused) == len(refusals):
            return f"speculation is off: {'; '.join(dict.fromkeys(refused.values()))}"
        return f"target-only in part: {'; '.join(refused.values())}"


class VerifiedCollector(Collector):
    """One gauge a rule; registered only where a record is required."""

    def __init__(self, verified: PairVerification) -> None:
        self._verified = verified

    def collect(self) -> Iterable[Metric]:
        """Give the verdicts as of now."""
        gauge = GaugeMetricFamily(
            "specserve_orchestrator_verified",
            "1 where a passing record fits the pair and the rule, 0 where rounds are target-only",
            labels=["rule"],
        )
        for rule, refusal in self._verified.refusals().items():
            gauge.add_metric([rule], float(not refusal))
        yield gauge
