"""What an orchestrator has learned about rounds, and whether it speculates at all.

Owns the learned costs and acceptance, shared by its requests, and the switch that turns speculation
off, on or to automatic while it serves. Knows configuration and requests' settings; the maths is
`speculation/length_*.py`, one request's rounds are `request_length.py`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from specserve.config import OrchestratorConfig, SpeculativeConfig, SpeculativeMethod
from specserve.errors import InvalidRequest
from specserve.orchestrator.request_state import RequestState
from specserve.speculation.acceptance_rates import PoolAcceptance, RequestAcceptance
from specserve.speculation.cost_model import Load
from specserve.speculation.length_choice import Option, SpeculationMode, options_of
from specserve.speculation.length_controller import LengthController
from specserve.speculation.length_pool import LengthPool
from specserve.speculation.step_curve import StepCurve
from specserve.speculation.types import AcceptanceRule

logger = logging.getLogger(__name__)

MAX_TENANTS = 64
"""Kinds of requests (tenant, method, rule) whose acceptance is kept apart, the latest used."""


class LengthControl:
    """The switch, and what all requests of one orchestrator have learned together."""

    def __init__(
        self, config: OrchestratorConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.config = config
        self.speculative = config.speculative or SpeculativeConfig(num_speculative_tokens=0)
        self.clock = clock
        self._mode = _configured_mode(self.speculative)
        self._target_curve = StepCurve()
        self._pools: dict[SpeculativeMethod, LengthPool] = {}
        self._by_method: dict[tuple[SpeculativeMethod, AcceptanceRule], PoolAcceptance] = {}
        self._by_tenant: OrderedDict[
            tuple[bytes, SpeculativeMethod, AcceptanceRule], PoolAcceptance
        ] = OrderedDict()

    @property
    def mode(self) -> SpeculationMode:
        """How K is chosen at present."""
        return self._mode

    @property
    def configured_mode(self) -> SpeculationMode:
        """How K is chosen after a start."""
        return _configured_mode(self.speculative)

    def switch(self, mode: SpeculationMode) -> None:
        """Choose K otherwise from the next round of every request on, running ones included.

        Raises:
            InvalidRequest: there is nothing to switch on.
        """
        if mode is not SpeculationMode.OFF and not self.speculative.methods:
            raise InvalidRequest(
                "mode", f"{mode}; this orchestrator was started without speculation, only off fits"
            )
        if mode is not self._mode:
            logger.warning("speculation is now %s, it was %s", mode, self._mode)
        self._mode = mode

    def pool(self, method: SpeculativeMethod) -> LengthPool:
        """Return what requests with one method have learned together."""
        if method not in self._pools:
            # The target's forwards are the same whoever drafts.
            self._pools[method] = LengthPool(self.clock(), target_curve=self._target_curve)
        return self._pools[method]

    @property
    def pools(self) -> dict[SpeculativeMethod, LengthPool]:
        """What was learned, by method."""
        return dict(self._pools)

    @property
    def acceptances(self) -> dict[tuple[SpeculativeMethod, AcceptanceRule], PoolAcceptance]:
        """Acceptance by method and rule, all tenants together."""
        return dict(self._by_method)

    def estimates(self, method: SpeculativeMethod) -> list[Option]:
        """Return [K + 1] what rounds are expected to take and give, by the latest costs.

        Of the rule that was used most; under the load that was last decided for, or of one session
        alone. Empty before anything was measured.
        """
        pool = self._pools.get(method)
        used = [kept for (name, _), kept in self._by_method.items() if name == method]
        if pool is None or pool.costs.curve.is_empty or not used:
            return []
        costs = pool.costs.latest or pool.costs.costs(
            Load(1, 1, 0),
            self.speculative.num_speculative_tokens,
            self.config.num_decode_steps,
            self.clock(),
        )
        acceptance = RequestAcceptance(max(used, key=lambda kept: kept.num_rounds))
        return options_of(acceptance.expect(len(costs.round_s) - 1, alone=False), costs, 1)

    def open(
        self, state: RequestState, tenant_salt: bytes, num_steps_without: int
    ) -> LengthController | None:
        """Begin a request; None when it has no method."""
        if state.method is None:
            return None
        acceptance = self._acceptance(tenant_salt, state.method, state.sampling.rule)
        return self.pool(state.method).open(
            acceptance, num_steps_without, state.num_speculative_tokens
        )

    def _acceptance(
        self, tenant_salt: bytes, method: SpeculativeMethod, rule: AcceptanceRule
    ) -> PoolAcceptance:
        key = (tenant_salt, method, rule)
        found = self._by_tenant.get(key)
        if found is None:
            wider = self._by_method.setdefault((method, rule), PoolAcceptance())
            found = self._by_tenant[key] = PoolAcceptance(wider)
            if len(self._by_tenant) > MAX_TENANTS:
                self._by_tenant.popitem(last=False)
        self._by_tenant.move_to_end(key)
        return found


def _configured_mode(speculative: SpeculativeConfig) -> SpeculationMode:
    if not speculative.methods:
        return SpeculationMode.OFF
    if speculative.num_speculative_tokens_schedule == "auto":
        return SpeculationMode.AUTO
    return SpeculationMode.ON
