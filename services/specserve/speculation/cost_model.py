"""What a round costs at each K, learned from the rounds that were run.

A cost is asked for as though every session beside this one chose the same K: rows that one
session adds to a forward make all the others wait, so a choice that pays for one alone may cost
the whole. Knows seconds, rows and counts; knows no request, no token and no service. Clocks are
handed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from specserve.speculation.crowding import CROWD_WINDOW, Crowding
from specserve.speculation.step_curve import RecentMean, StepCurve

REFRESH_S = 0.05
"""Costs are worked out anew when the last ones are older than this, or the load has changed."""


class Load(NamedTuple):
    """Who else is there."""

    num_sessions: int
    """Sessions on the target, this one included."""
    num_draft_sessions: int
    """Sessions on the draft, this one included, whether they draft at present or not."""
    all_draft: bool = False
    """Nearly all sessions known here have had rounds with K > 0 for a while."""


class RoundTiming(NamedTuple):
    """Where the time of one round with draft tokens went, in seconds."""

    num_draft_tokens: int
    wall_s: float
    """From one decision to the next."""
    draft_wait_s: float
    """Waited for the proposal."""
    draft_queue_s: float
    draft_forward_s: float
    """Of the forwards that drafted while the round waited, together."""
    draft_rows: int
    """In the last of them; 0 for a proposer without a model."""
    num_hidden_tokens: int
    """Draft tokens that were drafted while the round before was verified."""
    verify_queue_s: float
    verify_forward_s: float
    verify_rows: int


class PlainTiming(NamedTuple):
    """Where the time of one decode-ahead call went, in seconds."""

    num_tokens: int
    wall_s: float
    """From one decision to the next."""
    first_wait_s: float
    """From the decision to the first token."""
    forwards: tuple[tuple[int, float], ...]
    """[num_tokens] (rows, seconds) of each token's forward."""


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Expected seconds of each choice under one load."""

    plain_s: float
    """Per token of decode-ahead, in calls of the usual length."""
    token_s: float
    """The same without what each call costs besides."""
    call_s: float
    """That: transport, and a forward that may be missed."""
    round_s: tuple[float, ...]
    """[max_k + 1] per round to which K draft tokens come; entry 0 is `plain_s`."""
    crowding: float
    """Times that, where all draft."""
    delay_s: tuple[float, ...]
    """[max_k + 1] what one session with K > 0 costs the others while they have K = 0, together."""
    num_sessions: int
    num_plain: int
    """Decode-ahead calls measured lately; 0: nothing is known."""
    num_rounds: int
    """Rounds with draft tokens measured lately; 0: nothing is known."""
    num_fruitless: int
    """Rounds that asked for draft tokens and got none, since the start."""
    plain_at: float
    """When decode-ahead was last measured."""

    def seconds(self, k: int, num_draft_tokens: float) -> float:
        """Return the time of a round that asks for K >= 1 and gets so many, of 1 to K."""
        return self.crowding * between(self.round_s, min(num_draft_tokens, k))


def between(seconds: Sequence[float], num_draft_tokens: float) -> float:
    """Return the time at a number of draft tokens, 1 or more; `seconds` is [max_k + 1]."""
    low = max(1, min(int(num_draft_tokens), len(seconds) - 1))
    high = min(low + 1, len(seconds) - 1)
    return seconds[low] + max(0.0, num_draft_tokens - low) * (seconds[high] - seconds[low])


class DraftCosts:
    """What one draft replica takes for K tokens."""

    def __init__(self) -> None:
        self.curve = StepCurve()
        """Per token drafted, by the sessions drafting together."""
        self.call_s = RecentMean()
        """What is neither queue nor forward: transport."""
        self.free_share = RecentMean(CROWD_WINDOW)
        """Of the draft tokens, those that no round waited a forward for: they were ready when they
        were asked for, or looked up without a model."""

    def observe(self, timing: RoundTiming, now: float) -> None:
        """Learn from a proposal."""
        busy_s = timing.draft_queue_s + timing.draft_forward_s
        self.call_s.add(max(0.0, timing.draft_wait_s - busy_s), now)
        k = timing.num_draft_tokens
        num_waited = k - timing.num_hidden_tokens if timing.draft_rows else 0
        self.free_share.add(1 - num_waited / k, now)
        if num_waited:
            self.curve.add(timing.draft_rows, timing.draft_forward_s / num_waited, now)

    def observe_late(self, waited_s: float, now: float) -> None:
        """Learn from a proposal that had not come when its round went on without it."""
        self.call_s.add(max(waited_s, self.call_s.value()), now)

    def seconds(self, k: int, num_sessions: float) -> float:
        """Return the forwards of a proposal of K tokens that its round waits for."""
        return k * (1 - self.free_share.value()) * self.curve.seconds(num_sessions)


class CostModel:
    """Costs of a pool of targets, with a pool of drafts beside it."""

    def __init__(self, curve: StepCurve | None = None) -> None:
        self.draft = DraftCosts()
        self.curve = StepCurve() if curve is None else curve
        """Of the targets."""
        self.plain_call_s = RecentMean()
        """Per call of decode-ahead, what is no forward: transport, and missing a forward."""
        self.plain_token_s = RecentMean()
        """The same per token after the first."""
        self.round_s = RecentMean()
        """Per round, what is neither draft, queue nor forward: transport and the orchestrator."""
        self.num_fruitless = 0
        """Rounds that asked for draft tokens and got none."""
        self._crowding: dict[int, Crowding] = {}  # {sessions in octaves: ...}
        self._costs: RoundCosts | None = None
        self._together: list[float] = []
        """[max_k] what its rounds with K > 0 would take without crowding."""
        self._asked: tuple[int, ...] = ()
        self._refreshed_at = float("-inf")

    def observe_plain(self, timing: PlainTiming, now: float) -> None:
        """Learn from one decode-ahead call."""
        for rows, seconds in timing.forwards:
            self.curve.add(rows, seconds, now)
        first_s = timing.forwards[0][1]
        self.plain_call_s.add(max(0.0, timing.first_wait_s - first_s), now)
        if timing.num_tokens > 1:
            later_s = sum(seconds for _, seconds in timing.forwards[1:])
            rest_s = timing.wall_s - timing.first_wait_s - later_s
            self.plain_token_s.add(max(0.0, rest_s / (timing.num_tokens - 1)), now)

    def observe_round(self, timing: RoundTiming, load: Load, now: float) -> None:
        """Learn from one round with draft tokens."""
        self.curve.add(timing.verify_rows, timing.verify_forward_s, now)
        self.draft.observe(timing, now)
        verify_s = timing.verify_queue_s + timing.verify_forward_s
        self.round_s.add(max(0.0, timing.wall_s - timing.draft_wait_s - verify_s), now)
        if load.all_draft:
            self._crowding.setdefault(load.num_sessions.bit_length(), Crowding()).add(
                timing.wall_s,
                timing.num_draft_tokens,
                load.num_sessions,
                lambda num_draft_tokens: self._expected_s(num_draft_tokens, load),
                now,
            )

    def costs(self, load: Load, max_k: int, num_steps: int, now: float) -> RoundCosts:
        """Return what each K costs if all choose it, K = 0 with `num_steps` tokens a call."""
        asked = (load.num_sessions, load.num_draft_sessions, max_k, num_steps)
        if (
            self._costs is None
            or asked != self._asked
            or not 0 <= now - self._refreshed_at < REFRESH_S
        ):
            self.curve.refresh(now)
            self.draft.curve.refresh(now)
            self._together = self._together_by_k(load, max_k)
            self._costs = self._work_out(load, self._together, num_steps, now)
            self._asked, self._refreshed_at = asked, now
        return self._costs

    def costs_of_fast_draft(
        self, num_sessions: int, max_k: int, num_steps: int, now: float
    ) -> RoundCosts:
        """Return what each K would cost if proposals came at once."""
        self.curve.refresh(now)
        load = Load(num_sessions, 1)
        costs = self._work_out(load, self._together_by_k(load, max_k), num_steps, now)
        rest_s = self.round_s.value()
        round_s = [self.curve.seconds(num_sessions * (k + 1)) + rest_s for k in range(1, max_k + 1)]
        return replace(costs, round_s=(costs.plain_s, *round_s), crowding=1.0)

    @property
    def latest(self) -> RoundCosts | None:
        """What was worked out last; None before that, and while nothing at all was measured."""
        return None if self.curve.is_empty else self._costs

    def last_round_s(self, k: int) -> float:
        """Return what was last worked out for a round with K draft tokens; 0 if nothing was."""
        costs = self._costs
        return costs.seconds(k, k) if costs is not None and k < len(costs.round_s) else 0.0

    def _work_out(
        self, load: Load, together_s: Sequence[float], num_steps: int, now: float
    ) -> RoundCosts:
        sessions = load.num_sessions
        alone_s = self.curve.seconds(sessions)
        token_s, call_s = alone_s + self.plain_token_s.value(), self.plain_call_s.value()
        plain_s = token_s + call_s / num_steps
        delay_s = [
            (sessions - 1) * max(0.0, self.curve.seconds(sessions + k) - alone_s)
            for k in range(1, len(together_s) + 1)
        ]
        return RoundCosts(
            plain_s=plain_s,
            token_s=token_s,
            call_s=call_s,
            round_s=(plain_s, *together_s),
            crowding=self.crowding(sessions, now),
            delay_s=(0.0, *delay_s),
            num_sessions=sessions,
            num_plain=self.plain_call_s.count,
            num_rounds=self.round_s.count,
            num_fruitless=self.num_fruitless,
            plain_at=self.plain_call_s.updated_at,
        )

    def _expected_s(self, num_draft_tokens: float, load: Load) -> float:
        """Return the time of a round without crowding if so many come to all, on average."""
        together = self._known_together(math.ceil(num_draft_tokens), load)
        return between((0.0, *together), num_draft_tokens)

    def _known_together(self, k: int, load: Load) -> Sequence[float]:
        sessions = (load.num_sessions, load.num_draft_sessions)
        if sessions == self._asked[:2] and k <= len(self._together):
            return self._together
        return self._together_by_k(load, k)

    def crowding(self, num_sessions: int, now: float) -> float:
        """Return how much longer rounds take than expected where all draft; 1 while not known."""
        known = self._crowding.get(num_sessions.bit_length())
        value = None if known is None else known.value(now)
        return 1.0 if value is None else value

    def _together_by_k(self, load: Load, max_k: int) -> list[float]:
        sessions = (load.num_sessions, load.num_draft_sessions)
        return [self._together_s(k, *sessions) for k in range(1, max_k + 1)]

    def _together_s(self, k: int, num_sessions: float, num_draft_sessions: float) -> float:
        """Return the time of a round when all take part: in step, or in two halves by turns."""
        rest_s = self.draft.call_s.value() + self.round_s.value()
        draft_s = self.draft.seconds(k, num_draft_sessions)
        in_step_s = draft_s + self.curve.seconds(num_sessions * (k + 1)) + rest_s
        if num_sessions < 2:
            return in_step_s
        # One half drafts while the other is verified; the slower device sets the pace.
        half_draft_s = self.draft.seconds(k, num_draft_sessions / 2)
        half_verify_s = self.curve.seconds(num_sessions / 2 * (k + 1))
        by_turns_s = max(half_draft_s + half_verify_s + rest_s, 2 * half_verify_s, 2 * half_draft_s)
        return min(in_step_s, by_turns_s)
