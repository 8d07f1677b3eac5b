"""The law of short texts after a prompt, as the target itself tells it.

Top-k leaves a small support, so the target can be asked for the probability of every short text:
its log-probabilities after each prefix, without any draft. Where the last token inside and the
first one outside are nearly tied, a forward of another shape may swap them: the tied ones are then
one cell, behind which nothing is told apart. Knows log-probabilities; judges nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.tools.generation_client import TextClient
from specserve.tools.verify.short_texts import Law

TOP_K = 3
LENGTH = 3
"""Tokens that are told; whoever draws decodes more, so that these are decided in whole rounds."""

TIED = -1
"""Stands for any token of a tie at the cut, and for all that follows it."""

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What may come after one prefix."""

    probs: dict[int, float]
    """By token, TIED for those that may be swapped; the sum is 1."""
    tied: frozenset[int]
    """The tokens of the tie, inside and outside; empty where the cut is clear."""


@dataclass(frozen=True, slots=True)
class ToldLaw:
    """The law of all short texts after one prompt."""

    probs: Law
    """By the first LENGTH tokens, TIED from the first tie at the cut on."""
    steps: dict[Text, Step]
    """What comes after each prefix that was asked about."""

    def cell_of(self, token_ids: Sequence[int]) -> Text:
        """Return the key of a text in `probs`; one that is not there if the law excludes it."""
        for place in range(LENGTH):
            prefix = tuple(token_ids[:place])
            if prefix not in self.steps:
                break  # behind a token that cannot be
            if token_ids[place] in self.steps[prefix].tied:
                return (*prefix, *[TIED] * (LENGTH - place))
        return tuple(token_ids[:LENGTH])


async def told_law(
    client: TextClient, prompt: Text, tie_margin: float, concurrency: int, name: str
) -> ToldLaw:
    """Ask the target, without any draft, for the law of the first LENGTH tokens.

    Args:
        name: of the requests.
    """
    slots = asyncio.Semaphore(concurrency)

    async def ask(prefix: Text) -> Step:
        async with slots:
            request_id = f"law-{name}-{'-'.join(map(str, prefix))}"
            told = await client.candidates((*prompt, *prefix), request_id)
        return step_of(told, tie_margin)

    steps: dict[Text, Step] = {}
    law: Law = {(): 1.0}
    for _ in range(LENGTH):
        prefixes = [prefix for prefix in law if TIED not in prefix]
        steps |= dict(zip(prefixes, await asyncio.gather(*map(ask, prefixes)), strict=True))
        law = {
            (*prefix, token_id): weight * p
            for prefix, weight in law.items()
            for token_id, p in (steps[prefix].probs if prefix in steps else {TIED: 1.0}).items()
        }
    return ToldLaw(law, steps)


def step_of(told: dict[int, float], tie_margin: float) -> Step:
    """Cut candidates to the TOP_K most likely ones, at temperature 1.

    Args:
        told: log-probabilities, of more than TOP_K tokens.
    """
    ranked = sorted(told, key=lambda token_id: (-told[token_id], token_id))
    inside, outside = ranked[:TOP_K], ranked[TOP_K:]
    weights = np.exp(np.array([told[token_id] - told[ranked[0]] for token_id in inside]))
    probs = dict(zip(inside, (weights / weights.sum()).tolist(), strict=True))
    # Those outside that may come in, and those inside that may have to go for them.
    may_come = [t for t in outside if told[inside[-1]] - told[t] <= tie_margin]
    if not may_come:
        return Step(probs, frozenset())
    may_go = [t for t in inside if told[t] - told[may_come[0]] <= tie_margin]
    merged = {t: p for t, p in probs.items() if t not in may_go}
    merged[TIED] = sum(probs[t] for t in may_go)
    return Step(merged, frozenset((*may_go, *may_come)))
