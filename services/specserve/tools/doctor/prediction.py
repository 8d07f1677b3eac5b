"""What a pair's speedup should be: by the standard formula, and by the orchestrator's cost model.

The formula knows acceptance and the draft's cost alone; the cost model learns from the same rounds
as an orchestrator does, transport, queues and wider forwards included, and says it for every K.
Pure: records in, numbers out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.config import OrchestratorConfig
from specserve.rpc.request_view import CallView, RequestView, RoundView
from specserve.speculation.acceptance_rates import PoolAcceptance
from specserve.speculation.cost_model import CostModel, Load, PlainTiming, RoundTiming
from specserve.speculation.length_choice import options_of
from specserve.tools.doctor.figures import Figures

MAX_K = 16
"""Longest proposal that is thought about."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Two answers to one question."""

    formula: float
    """(1 - a^(K + 1)) / ((1 - a)(1 + cK))."""
    by_k: tuple[float, ...]
    """[max_k + 1] speedup over K = 0 by the cost model; entry 0 is 1."""
    k: int
    """The K that most rounds asked for; a draft that stops short of it gives fewer."""

    @property
    def at_k(self) -> float:
        """By the cost model, at the present K."""
        return self.by_k[self.k]

    @property
    def best_k(self) -> int:
        """The K that the cost model would choose."""
        return max(range(len(self.by_k)), key=lambda k: self.by_k[k])


def formula(acceptance: float, k: float, draft_cost: float) -> float:
    """Return the speedup of a draft with this acceptance per token and this cost c."""
    a = min(max(acceptance, 0.0), 1.0)
    tokens = k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a)
    return tokens / (1 + draft_cost * k)


def predict(views: Sequence[RequestView], figures: Figures) -> Prediction:
    """Let the cost model see all rounds in their order, and ask it."""
    model, acceptance = CostModel(), PoolAcceptance()
    rounds = [
        (view.arrived_unix_s + one.began_s + one.wall_s, one)
        for view in views
        for one in view.rounds[1:]
        if one.num_emitted_tokens and not any(call.error for call in one.calls)
    ]
    ks, batches, draft_batches = [], [1], [1]
    for at, one in sorted(rounds, key=lambda pair: pair[0]):
        draft, verify = _call(one, "draft"), _call(one, "target")
        if verify is None:
            continue
        batches.append(verify.batch_size)
        if not one.num_draft_tokens:
            model.observe_plain(_plain_timing(one, verify), at)
            continue
        ks.append(one.num_speculative_tokens)
        if draft is not None:
            draft_batches.append(draft.batch_size)
        model.observe_round(_round_timing(one, draft, verify), Load(1, 1), at)
        acceptance.observe(
            one.num_speculative_tokens, one.num_draft_tokens, one.num_accepted_tokens
        )
    k = min(statistics.mode(ks), MAX_K) if ks else 1
    load = Load(round(statistics.median(batches)), round(statistics.median(draft_batches)))
    max_k = min(MAX_K, 2 * k)
    num_steps = OrchestratorConfig().num_decode_steps
    last = max((at for at, _ in rounds), default=0.0)
    costs = model.costs(load, max_k, num_steps, last)
    options = options_of(acceptance.rates(max_k).expect(), costs, 1)
    plain = options[0].rate
    by_k = tuple(option.rate / plain if plain else 0.0 for option in options)
    return Prediction(formula(figures.acceptance, figures.k, figures.draft_cost), by_k, k)


def _call(one: RoundView, service: str) -> CallView | None:
    found = (c for c in one.calls if c.service == service and not c.is_background)
    return next(found, None)


def _plain_timing(one: RoundView, verify: CallView) -> PlainTiming:
    """Share a call of decode-ahead out evenly; only its last forward's rows are recorded."""
    count = one.num_emitted_tokens
    token_s = verify.forward_s / count
    return PlainTiming(
        num_tokens=count,
        wall_s=one.wall_s,
        first_wait_s=one.wall_s - (count - 1) * token_s,
        forwards=((verify.rows, token_s),) * count,
    )


def _round_timing(one: RoundView, draft: CallView | None, verify: CallView) -> RoundTiming:
    stages = one.stages
    draft_s = stages.draft_queue_s + stages.draft_forward_s + stages.draft_transport_s
    return RoundTiming(
        num_draft_tokens=one.num_draft_tokens,
        wall_s=one.wall_s,
        draft_wait_s=draft_s,
        draft_queue_s=stages.draft_queue_s,
        draft_forward_s=stages.draft_forward_s,
        draft_rows=0 if draft is None else draft.rows,
        num_hidden_tokens=0 if draft is None else min(draft.hidden_tokens, one.num_draft_tokens),
        verify_queue_s=stages.verify_queue_s,
        verify_forward_s=stages.verify_forward_s,
        verify_rows=verify.rows,
    )
