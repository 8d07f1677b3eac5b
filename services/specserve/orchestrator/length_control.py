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

from specserve.config import (
    DRAFT_MODEL_METHODS,
    OrchestratorConfig,
    SpeculativeConfig,
    SpeculativeMethod,
)
from specserve.errors import InvalidRequest
from specserve.orchestrator.pool import DraftLink, TargetLink
from specserve.orchestrator.request_state import RequestState
from specserve.speculation.acceptance_rates import PoolAcceptance
from specserve.speculation.cost_model import Load
from specserve.speculation.draft_demand import fast_draft_length
from specserve.speculation.length_choice import Option, SpeculationMode, options_of
from specserve.speculation.length_controller import WARMUP_ROUNDS, LengthController
from specserve.speculation.length_pool import LengthPool
from specserve.speculation.length_table import length_by_batch_size
from specserve.speculation.step_curve import StepCurve
from specserve.speculation.types import AcceptanceRule

logger = logging.getLogger(__name__)

MAX_TENANTS = 64
"""Kinds of requests (tenant, method, rule) whose acceptance is kept apart, the latest used."""


class LengthControl:
    """The switch, and what all requests of one orchestrator have learned together."""

    def __init__(
        self,
        config: OrchestratorConfig,
        clock: Callable[[], float] = time.perf_counter,
        refusal: Callable[[RequestState, TargetLink | None, DraftLink | None], str] | None = None,
    ) -> None:
        """Prepare for a deployment.

        Args:
            refusal: says why a request may not speculate over these replicas; "" where it may.
        """
        self.config = config
        self.refusal = refusal or (lambda state, target, draft: "")
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
        used = self._most_used(method)
        if pool is None or pool.costs.curve.is_empty or used is None:
            return []
        costs = pool.costs.latest or pool.costs.costs(
            Load(1, 1),
            self.speculative.num_speculative_tokens,
            self.config.num_decode_steps,
            self.clock(),
        )
        return options_of(used.rates(len(costs.round_s) - 1).expect(), costs, 1)

    def draft_demand(self, num_sessions: int) -> float:
        """Return the sessions' worth of drafting that running requests could use, were it fast.

        A session that would ask for the configured K counts whole, one that would ask for half of
        it half. While nothing is known of costs or acceptance every session counts: drafts have to
        be there to be measured.

        Args:
            num_sessions: on one target, about.
        """
        if self._mode is SpeculationMode.OFF:
            return 0.0
        return sum(
            pool.num_requests * self._fast_share(method, max(1, num_sessions))
            for method, pool in self._pools.items()
            if method in DRAFT_MODEL_METHODS
        )

    @property
    def num_draftable(self) -> int:
        """Running requests that would ask a draft if it were found worth it; 0 unless K is chosen.

        Where speculation is switched off, or K is set, there is nothing to find out.
        """
        if self._mode is not SpeculationMode.AUTO:
            return 0
        return sum(
            pool.num_requests
            for method, pool in self._pools.items()
            if method in DRAFT_MODEL_METHODS
        )

    def _fast_share(self, method: SpeculativeMethod, num_sessions: int) -> float:
        """Return the K of rounds with a fast draft, as a share of the configured one."""
        speculative, pool = self.speculative, self._pools[method]
        max_k = speculative.num_speculative_tokens
        table = speculative.num_speculative_tokens_per_batch_size
        k = length_by_batch_size(table, num_sessions, max_k)
        if k is not None:
            return k / max_k
        acceptance = self._most_used(method)
        is_known = acceptance is not None and acceptance.num_rounds >= WARMUP_ROUNDS
        if self._mode is SpeculationMode.ON or acceptance is None or not is_known:
            return 1.0
        costs = pool.costs.costs_of_fast_draft(
            num_sessions, max_k, self.config.num_decode_steps, self.clock()
        )
        options = options_of(acceptance.rates(max_k).expect(), costs, 1)
        return fast_draft_length(options) / max_k

    def _most_used(self, method: SpeculativeMethod) -> PoolAcceptance | None:
        used = [kept for (name, _), kept in list(self._by_method.items()) if name == method]
        return max(used, key=lambda kept: kept.num_rounds, default=None)

    def open(
        self, state: RequestState, tenant_salt: bytes, num_steps_without: int
    ) -> LengthController | None:
        """Begin a request; None when it has no method."""
        if state.method is None:
            return None
        acceptance = self._acceptance(tenant_salt, state.method, state.sampling.rule)
        return self.pool(state.method).open(
            acceptance, num_steps_without, state.num_speculative_tokens, self.clock()
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
