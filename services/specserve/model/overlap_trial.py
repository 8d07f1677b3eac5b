"""Whether drafting ahead pays, tried out: rounds with and without it by turns, and the faster kept.

What it does to a system cannot be told from the draft alone: sessions that hit leave the step of
those that miss, and where draft and target share a machine it takes time from the target. Both show
in how fast rounds commit tokens. Knows times and counts; knows no session and no branch.
"""

from __future__ import annotations

from specserve.speculation.types import AcceptanceRule

_NUM_ROUNDS = 48
"""Rounds that measure one way; twice as many where sessions share forwards."""

_NUM_PARTS = 4
"""A try ends after so many parts of a measurement, or after any of them that ..."""

_CLEAR = 1.08
"""... was so much faster, or slower, than the other way."""

_NUM_SETTLING = 4
"""Rounds after a change that do not count; eight times as many where sessions first have to fall
into step, or out of it."""

_LEAST_GAIN = 1.02
"""Drafting ahead must be so much faster to be kept: one measurement is no surer than that."""

_NEW_SHARE = 0.5
"""Weight of the latest measurement of a way among all of them."""

_LEAST_KEPT, _MOST_KEPT = 2, 64
"""So many measurements pass until the other way is tried again: ..."""

_KEEP_GROWTH = 4
"""... each time so many times as many, while it stays slower."""

_LONGEST_ROUND_S = 1.0
"""A longer one was a pause, which says nothing."""


class TokensPerRound:
    """Tokens that a round commits, by the number it drafts: the same with and without overlap.

    Comparing with these means, not with what the measured rounds happened to commit, leaves the
    noise of acceptance out.
    """

    def __init__(self) -> None:
        self._total: dict[int, list[int]] = {}

    def note(self, num_speculative_tokens: int, num_tokens: int) -> None:
        """Count a round."""
        total = self._total.setdefault(num_speculative_tokens, [0, 0])
        total[0] += 1
        total[1] += num_tokens

    def mean(self, num_speculative_tokens: int) -> float:
        """Return the mean of rounds that were noted."""
        count, num_tokens = self._total[num_speculative_tokens]
        return num_tokens / count


class OverlapTrial:
    """One kind of load."""

    def __init__(self, tokens_per_round: TokensPerRound, *, is_alone: bool) -> None:
        """Begin: with drafting ahead for a session alone, without it for several.

        Alone it has its draft for itself while it is verified. Among others it may cost them more
        than it saves: there the gain is to be seen first.
        """
        self.is_on = is_alone
        self.turn = 0
        """Counts the changes; a round that saw one is not to be noted."""
        self._num_rounds = _NUM_ROUNDS if is_alone else 2 * _NUM_ROUNDS
        self._num_settling = _NUM_SETTLING if is_alone else 8 * _NUM_SETTLING
        self._tokens_per_round = tokens_per_round
        self._rates: dict[bool, float] = {}
        self._drafted: list[int] = []
        self._num_settled = 0
        self._seconds = 0.0
        self._is_trying = False
        self._num_kept = 0
        self._keep = _LEAST_KEPT if is_alone else 1

    def note(self, seconds: float, num_speculative_tokens: int, num_tokens: int) -> None:
        """Count a round.

        Args:
            seconds: from a session's call to its next one.
            num_speculative_tokens: asked for by the call.
            num_tokens: committed until the next one.
        """
        if seconds > _LONGEST_ROUND_S:
            return
        self._tokens_per_round.note(num_speculative_tokens, num_tokens)
        if self._num_settled < self._num_settling:
            self._num_settled += 1
            return
        self._seconds += seconds
        self._drafted.append(num_speculative_tokens)
        if len(self._drafted) == self._num_rounds or self._is_clear():
            self._end_measurement()

    @property
    def _rate(self) -> float:
        """Tokens a second of the rounds of this measurement; 0 if they took no time."""
        num_tokens = sum(self._tokens_per_round.mean(k) for k in self._drafted)
        return num_tokens / self._seconds if self._seconds > 0.0 else 0.0

    def _is_clear(self) -> bool:
        """Whether a try has shown enough before it is over."""
        other = self._rates.get(not self.is_on)
        if not self._is_trying or other is None:
            return False
        if len(self._drafted) % (self._num_rounds // _NUM_PARTS):
            return False
        return not other / _CLEAR < self._rate < other * _CLEAR

    def _end_measurement(self) -> None:
        rate = self._rate
        if rate:
            before = self._rates.get(self.is_on, rate)
            self._rates[self.is_on] = before + _NEW_SHARE * (rate - before)
        self._drafted, self._seconds = [], 0.0
        was_on = self.is_on
        if self._is_trying:
            self.is_on = self._rates.get(True, 0.0) > _LEAST_GAIN * self._rates.get(False, 0.0)
            changes_mind = self.is_on == was_on
            self._keep = _LEAST_KEPT if changes_mind else min(_KEEP_GROWTH * self._keep, _MOST_KEPT)
            self._is_trying, self._num_kept = False, 0
        else:
            self._num_kept += 1
            if self._num_kept >= self._keep:
                self.is_on, self._is_trying = not self.is_on, True
        if self.is_on != was_on:
            self.turn += 1
            self._num_settled = 0


class OverlapTrials:
    """A trial for each order of magnitude of sessions, and rule: what pays for one may not pay for
    many, and how often a draft foresees what a round commits depends on the rule.
    """

    def __init__(self) -> None:
        self._trials: dict[tuple[int, AcceptanceRule], OverlapTrial] = {}
        self._tokens_per_round: dict[AcceptanceRule, TokensPerRound] = {}

    def of(self, num_sessions: int, rule: AcceptanceRule) -> OverlapTrial:
        """Return the trial of so many sessions at once."""
        key = (num_sessions.bit_length(), rule)
        if key not in self._trials:
            tokens = self._tokens_per_round.setdefault(rule, TokensPerRound())
            self._trials[key] = OverlapTrial(tokens, is_alone=num_sessions <= 1)
        return self._trials[key]
