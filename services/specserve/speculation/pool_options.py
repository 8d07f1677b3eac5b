"""What the requests of one kind choose from, worked out once for all of them.

Anew whenever the costs are, and not for each round of each request: among many sessions that would
be the orchestrator's dearest work. Knows rates and costs; knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.speculation.acceptance_rates import PoolAcceptance, Rates
from specserve.speculation.cost_model import RoundCosts
from specserve.speculation.length_choice import Option, options_of


class PoolOptions:
    """Rates and options of a pool of requests with the same largest K.

    Handed the pool's acceptance each time: it may be forgotten before its options are.
    """

    def __init__(self, max_k: int) -> None:
        self._max_k = max_k
        self._costs: RoundCosts | None = None
        self._rates = Rates([], [])
        self._options: dict[int, Sequence[Option]] = {}

    def rates(self, acceptance: PoolAcceptance, costs: RoundCosts) -> Rates:
        """Return the pool's rates as they were when these costs came."""
        if costs is not self._costs:
            self._costs = costs
            self._rates = acceptance.rates(self._max_k)
            self._options.clear()
        return self._rates

    def options(
        self, acceptance: PoolAcceptance, costs: RoundCosts, num_steps_without: int
    ) -> Sequence[Option]:
        """Return [max_k + 1] the options, K = 0 first.

        Args:
            num_steps_without: tokens decoded ahead in a round to which no draft token comes.
        """
        rates = self.rates(acceptance, costs)
        found = self._options.get(num_steps_without)
        if found is None:
            found = options_of(rates.expect(), costs, num_steps_without)
            self._options[num_steps_without] = found
        return found
