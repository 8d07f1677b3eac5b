"""From what the draft foresees of each row to the probabilities of a round's outcomes.

The forecasts (`speculation/outcomes.py`) rank; what their numbers are worth is counted here over
verified tokens, by rule. Knows rows and counts; knows no session and no branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specserve.speculation.outcomes import RowForecast
from specserve.speculation.types import AcceptanceRule

_NUM_BUCKETS = 10
_PRIOR_COUNT = 4.0
_MOST_COUNT = 256.0
"""Older observations fade: a bucket's mean moves by at least 1/256."""

_TYPICAL_BONUS_WEIGHTS = (0.6, 0.2, 0.1)
"""What the best bonus tokens may weigh, before their row is computed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way a round can end."""

    probability: float
    row: int
    """Accepted draft tokens."""
    token_id: int
    """The recovered or bonus token."""


class _Calibration:
    """How often something happened, by a number in [0, 1] that goes with its likelihood."""

    def __init__(self, exponent: float) -> None:
        """Start from "as likely as the number says".

        Args:
            exponent: below 1, small numbers are told apart more finely than large ones.
        """
        self._exponent = exponent
        self._mean: list[float] = [
            ((bucket + 0.5) / _NUM_BUCKETS) ** (1 / exponent) for bucket in range(_NUM_BUCKETS)
        ]
        self._count = [_PRIOR_COUNT] * _NUM_BUCKETS

    def estimate(self, value: float) -> float:
        """Return the share of cases like this one in which it happened."""
        return self._mean[self._bucket(value)]

    def learn(self, value: float, happened: bool) -> None:
        """Count one case."""
        bucket = self._bucket(value)
        self._count[bucket] = min(self._count[bucket] + 1.0, _MOST_COUNT)
        self._mean[bucket] += (float(happened) - self._mean[bucket]) / self._count[bucket]

    def _bucket(self, value: float) -> int:
        return min(_NUM_BUCKETS - 1, int(value**self._exponent * _NUM_BUCKETS))


class _RuleOdds:
    def __init__(self) -> None:
        self.accepted = _Calibration(1.0)
        self.recovered = _Calibration(0.5)
        self.bonus = _Calibration(0.5)


class OutcomeOdds:
    """What forecasts proved to be worth, over all sessions of an engine."""

    def __init__(self) -> None:
        self._rules = {rule: _RuleOdds() for rule in AcceptanceRule}

    def acceptances(self, rule: AcceptanceRule, rows: Sequence[RowForecast]) -> list[float]:
        """Return the probability that at least i draft tokens are accepted, i = 0..len(rows)."""
        accepted = self._rules[rule].accepted
        reached = [1.0]
        for row in rows:
            reached.append(reached[-1] * accepted.estimate(row.confidence))
        return reached

    def rejections(self, rule: AcceptanceRule, rows: Sequence[RowForecast]) -> list[Outcome]:
        """Return the outcomes that end at a draft row, likeliest first."""
        reached = self.acceptances(rule, rows)
        recovered = self._rules[rule].recovered
        return _sorted(
            Outcome((reached[i] - reached[i + 1]) * recovered.estimate(weight), i, token_id)
            for i, row in enumerate(rows)
            for token_id, weight in zip(row.token_ids, row.weights, strict=True)
        )

    def bonuses(
        self, rule: AcceptanceRule, reached: float, num_rows: int, bonus: RowForecast
    ) -> list[Outcome]:
        """Return the outcomes of full acceptance, likeliest first.

        Args:
            reached: probability of full acceptance.
            num_rows: draft rows of the round.
        """
        odds = self._rules[rule].bonus
        return _sorted(
            Outcome(reached * odds.estimate(weight), num_rows, token_id)
            for token_id, weight in zip(bonus.token_ids, bonus.weights, strict=True)
        )

    def unseen_bonuses(self, rule: AcceptanceRule, reached: float) -> list[float]:
        """Guess the probabilities of the best bonus outcomes while their row is not computed."""
        odds = self._rules[rule].bonus
        return [reached * odds.estimate(weight) for weight in _TYPICAL_BONUS_WEIGHTS]

    def learn(
        self,
        rule: AcceptanceRule,
        rows: Sequence[RowForecast],
        bonus: RowForecast | None,
        num_accepted: int,
        token_id: int,
    ) -> None:
        """Count how a round ended.

        Args:
            rows: its draft rows.
            bonus: its last row, where that was computed.
        """
        odds = self._rules[rule]
        for i, row in enumerate(rows[: num_accepted + 1]):
            odds.accepted.learn(row.confidence, i < num_accepted)
        ended = rows[num_accepted] if num_accepted < len(rows) else bonus
        if ended is None:
            return
        calibration = odds.recovered if num_accepted < len(rows) else odds.bonus
        for candidate, weight in zip(ended.token_ids, ended.weights, strict=True):
            calibration.learn(weight, candidate == token_id)


def _sorted(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: -outcome.probability)
