"""What a round with draft tokens is worth in tokens, learned from the rounds that were verified.

Two shares by position of the block, of the rounds that asked for a token there: those to which one
came (a lookup often finds fewer, or none, and an unsure draft stops), and those that accepted one.
Position i is looked at when every one before it came, or was accepted; acceptance only in rounds to
which some token came. A token that did not come was not accepted: where guesses are long because
they are good, share that came times share accepted of these would be far too little.
Knows counts; knows no token, no time and no service.
"""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_RATE = 0.6
"""What a pool expects of the first token of a draft that it has never seen: enough to try it."""

POOL_PRIOR_WEIGHT = 2.0
"""Tokens that this expectation is worth."""

POOL_FADE = 0.995
"""Weight of a pool's evidence after one more round: the last 200 rounds or so count."""

REQUEST_PRIOR_WEIGHT = 4.0
"""Tokens that the pool's rate is worth to a request that is unlike it."""

UNLIKE = 2.5
"""Standard deviations by which a request must differ from its pool to go its own way. Requests that
are alike then choose alike: a mixture of both modes is slower than either."""

REQUEST_FADE = 0.95
"""Weight of a request's evidence after one more round: the last 20 rounds or so count."""

SMALLEST_UNIT = 1e-60
"""Counts are rescaled before they could overflow."""

REQUEST_FADE_PER_TOKEN = 0.99
"""The same per token committed without a draft: an old opinion gives way to a new probe."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What to expect of a round, by the K it asks for; every list is [max_k + 1]."""

    num_draft_tokens: list[float]
    """Draft tokens that come, where any come at all."""
    num_tokens: list[float]
    """Tokens that such a round commits."""
    share_empty: float
    """Of the rounds that ask, those to which no draft token comes."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares by position, [max_k] each, given that all before it came, or were accepted."""

    accepted: list[float]
    """Of the rounds that ask for a token there and to which any came: those that accept it."""
    offered: list[float]
    """Of the rounds that ask for a token there: those to which it comes."""

    def expect(self) -> Expectation:
        """Return what a round is worth at each K."""
        drafted, tokens, came, reached = [0.0], [1.0], 1.0, 1.0
        for position, (accepted, offered) in enumerate(
            zip(self.accepted, self.offered, strict=True)
        ):
            # The first token is there: rounds to which none comes are counted apart.
            came *= offered if position else 1.0
            reached *= accepted
            drafted.append(drafted[-1] + came)
            tokens.append(tokens[-1] + reached)
        return Expectation(drafted, tokens, 1 - self.offered[0] if self.offered else 0.0)


class _Counts:
    """Chances and hits by position, the old ones worth less and less.

    Instead of every count shrinking each round, what is new weighs more: one number fades.
    """

    __slots__ = ("_chances", "_hits", "_unit")

    def __init__(self) -> None:
        self._chances: list[float] = []
        self._hits: list[float] = []
        self._unit = 1.0
        """What a count of 1 is worth by now."""

    def fade(self, share: float) -> None:
        """Let everything counted so far be worth that share of what it was."""
        self._unit *= share
        if self._unit < SMALLEST_UNIT:
            self._chances = [count * self._unit for count in self._chances]
            self._hits = [count * self._unit for count in self._hits]
            self._unit = 1.0

    def add(self, num_asked: int, num_hits: int) -> None:
        """Count a round: its hits, and the first position without one, if it was asked for."""
        num_chances = min(num_hits + 1, num_asked)
        chances, hits, new = self._chances, self._hits, 1.0 / self._unit
        while len(chances) < num_chances:
            chances.append(0.0)
            hits.append(0.0)
        for position in range(num_chances):
            chances[position] += new
            if position < num_hits:
                hits[position] += new

    def mixed(self, position: int, prior_rate: float, prior_weight: float) -> float:
        """Return the share of hits at a position, given hits at all before it."""
        if position >= len(self._chances):
            return prior_rate
        chances, hits = self._chances[position], self._hits[position]
        chances, hits = chances * self._unit, hits * self._unit
        return (hits + prior_weight * prior_rate) / (chances + prior_weight)

    def is_unlike(self, rates: list[float]) -> bool:
        """Say whether there were more hits, or fewer, than chance makes of these rates."""
        surplus = variance = 0.0
        for chances, hits, rate in zip(self._chances, self._hits, rates, strict=False):
            surplus += hits - chances * rate
            variance += chances * rate * (1 - rate)
        return surplus * surplus * self._unit > UNLIKE * UNLIKE * variance


class PoolAcceptance:
    """Acceptance over the requests of a pool: where a new request starts from."""

    def __init__(self, wider: PoolAcceptance | None = None) -> None:
        """Build one; `wider` is a pool that this one is a part of, and is told everything too."""
        self.num_rounds: int = 0 if wider is None else wider.num_rounds
        """Rounds verified, those of the wider pool before this one began included."""
        self._wider = wider
        self._accepted = _Counts()
        self._offered = _Counts()

    def observe(self, num_asked: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Take a round."""
        self.num_rounds += 1
        if self._wider is not None:
            self._wider.observe(num_asked, num_draft_tokens, num_accepted)
        if num_draft_tokens:
            self._accepted.fade(POOL_FADE)
            self._accepted.add(num_asked, num_accepted)
        self._offered.fade(POOL_FADE)
        self._offered.add(num_asked, num_draft_tokens)

    def rates(self, max_k: int) -> Rates:
        """Return what is known by now of K = 1 ... max_k.

        A position with little evidence takes after the one before it.
        """
        wider = None if self._wider is None else self._wider.rates(max_k)
        accepted, offered, rate = [], [], PRIOR_RATE
        for position in range(max_k):
            prior = rate if wider is None else wider.accepted[position]
            rate = self._accepted.mixed(position, prior, POOL_PRIOR_WEIGHT)
            accepted.append(rate)
            prior = 1.0 if wider is None else wider.offered[position]
            offered.append(self._offered.mixed(position, prior, POOL_PRIOR_WEIGHT))
        return Rates(accepted, offered)


class RequestAcceptance:
    """Acceptance of one request: its pool's, until its own is clearly another."""

    def __init__(self, pool: PoolAcceptance) -> None:
        self._pool = pool
        self._accepted = _Counts()
        self._offered = _Counts()

    @property
    def num_pool_rounds(self) -> int:
        """Rounds that the pool has seen verified."""
        return self._pool.num_rounds

    def observe(self, num_asked: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Take a round, here and in the pool."""
        self._pool.observe(num_asked, num_draft_tokens, num_accepted)
        if num_draft_tokens:
            self._accepted.fade(REQUEST_FADE)
            self._accepted.add(num_asked, num_accepted)
        self._offered.fade(REQUEST_FADE)
        self._offered.add(num_asked, num_draft_tokens)

    def fade(self, num_tokens: int) -> None:
        """Let old evidence fade over tokens that were committed without a draft."""
        share = REQUEST_FADE_PER_TOKEN**num_tokens
        self._accepted.fade(share)
        self._offered.fade(share)

    def is_unlike(self, pool: Rates) -> bool:
        """Say whether this request goes its own way."""
        return self._accepted.is_unlike(pool.accepted) or self._offered.is_unlike(pool.offered)

    def own(self, pool: Rates) -> Rates:
        """Mix what this request was seen to do with what its pool does.

        Where the first token is accepted less than in the pool, the later ones, which are then
        seldom reached, are taken to be as well.
        """
        accepted, ratio = [], 1.0
        for position, rate in enumerate(pool.accepted):
            own = self._accepted.mixed(position, min(1.0, ratio * rate), REQUEST_PRIOR_WEIGHT)
            ratio = own / rate if rate > 0 else 1.0
            accepted.append(own)
        offered = [
            self._offered.mixed(position, rate, REQUEST_PRIOR_WEIGHT)
            for position, rate in enumerate(pool.offered)
        ]
        return Rates(accepted, offered)
