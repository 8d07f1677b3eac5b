"""The choices of a round, what each is worth, and which of them stands.

Knows tokens and seconds; knows no request and no measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from specserve.speculation.acceptance_rates import Expectation
from specserve.speculation.cost_model import RoundCosts

MARGIN = 1.02
"""A choice must be this much better than the one that stands, ..."""

MARGIN_AMONG = 1.1
"""The same for drafting instead of decode-ahead while there are other sessions: what their rounds
would take is a model's word until they run."""

NUM_TIMES = 4
"""... this many rounds in a row, ..."""

NUM_TIMES_AMONG = 8
"""Rounds of the same: a slow second of the machine must not look like slow decode-ahead."""

CLEAR_MARGIN = 1.5
"""... or so much better that nobody need look twice."""


class SpeculationMode(StrEnum):
    """Whether rounds speculate; an operator may change it while requests run."""

    OFF = "off"
    """K = 0."""
    ON = "on"
    """The configured K."""
    AUTO = "auto"
    """The K that promises the most tokens per second."""


class Reason(StrEnum):
    """Why a round has its K; also a metric's label, so the set is fixed."""

    BEST = "best"
    """It has the highest expected rate."""
    HYSTERESIS = "hysteresis"
    """Another K looks better, but not by enough or not for long enough."""
    PROBE = "probe"
    """It is measured, so that a change is noticed."""
    WARMUP = "warmup"
    """Nothing is known yet."""
    CATCH_UP = "catch_up"
    """K > 0 was chosen; the draft first takes in what was committed without it."""
    STATIC = "static"
    """It was configured, or asked for by the request."""
    BATCH_SIZE = "batch_size"
    """The configured table names it for this many sessions."""
    SPECULATION_OFF = "speculation_off"
    """Speculation is switched off, or there is none for this request."""
    UNVERIFIED = "unverified"
    """A record of verification is required, and none fits."""
    FIRST_ROUND = "first_round"
    """The prompt's own round: the first token waits for no draft."""
    MAX_TOKENS = "max_tokens"
    """No room for a draft token before max_tokens."""
    CONTEXT = "context"
    """No room for a draft token in the context of target or draft."""
    DRAFT_PRESSURE = "draft_pressure"
    """Calls queue at the draft: fewer draft tokens, or none, were asked for than was chosen."""
    DRAFT_LATE = "draft_late"
    """A proposal missed its round, or is still under way."""
    DRAFT_LOST = "draft_lost"
    """No draft is attached, or it failed."""
    NO_PROPOSAL = "no_proposal"
    """The proposer was asked and had nothing to say."""


class Choice(NamedTuple):
    """What the next round does."""

    num_speculative_tokens: int
    """K; 0 decodes ahead."""
    reason: Reason
    num_steps: int = 0
    """With K = 0: most tokens to decode ahead before the next decision; 0 leaves it open."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a choice is expected to give and to take."""

    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Committed tokens per second of one session."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def loss_s(self, other: Option) -> float:
        """Return the seconds more than the same tokens take by `other`; never below 0."""
        if other.rate == 0:
            return 0.0
        return max(0.0, self.seconds - self.num_tokens / other.rate)


def options_of(expected: Expectation, costs: RoundCosts, num_steps_without: int) -> list[Option]:
    """Return [max_k + 1] the options, K = 0 first.

    Args:
        num_steps_without: tokens decoded ahead in a round to which no draft token comes.
    """
    empty_s = costs.call_s + num_steps_without * costs.token_s
    options = [Option(1.0, costs.plain_s)]
    for k in range(1, len(costs.round_s)):
        # Fewer draft tokens than were asked for cost less as well.
        seconds = costs.seconds(k, expected.num_draft_tokens[k])
        empty = expected.share_empty
        options.append(
            Option(
                (1 - empty) * expected.num_tokens[k] + empty * num_steps_without,
                (1 - empty) * seconds + empty * empty_s,
            )
        )
    return options


def best_of(options: Sequence[Option], *, least_k: int = 0) -> int:
    """Return the K with the highest rate, of those from `least_k` on."""
    return max(range(least_k, len(options)), key=lambda k: options[k].rate)


class Standing:
    """The choice that stands until another has been better for some rounds."""

    def __init__(self, k: int | None = None) -> None:
        self.k = k
        """None before the first choice."""
        self.num_switches = 0
        self._streak = 0
        self._next_at = float("-inf")

    def settle(self, options: Sequence[Option], now: float, *, is_alone: bool = True) -> Reason:
        """Move to the best option if it is better enough for long enough."""
        best = best_of(options)
        is_unproven = not is_alone and not self.k
        margin, num_times = (MARGIN_AMONG, NUM_TIMES_AMONG) if is_unproven else (MARGIN, NUM_TIMES)
        if self.k is None and is_unproven and options[best].rate < margin * options[0].rate:
            self.k = 0
        if self.k is None:
            self.k = best
        current = min(self.k, len(options) - 1)
        if best == current:
            self._streak = 0
            return Reason.BEST
        # Many requests may look in the course of one round: it counts once.
        if now >= self._next_at:
            self._next_at = now + options[current].seconds
            better = options[best].rate >= margin * options[current].rate
            self._streak = self._streak + 1 if better else 0
        if self._streak < num_times and options[best].rate < CLEAR_MARGIN * options[current].rate:
            return Reason.HYSTERESIS
        self.k, self._streak = best, 0
        self.num_switches += 1
        return Reason.BEST
