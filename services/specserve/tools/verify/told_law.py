"""The law of short texts after a prompt, as the target itself tells it.

The target is asked, without any draft, for its log-probabilities after each prefix. With top-k the
support is small, and the probability of every short text is known; where the last token inside and
the first one outside are nearly tied, a forward of another shape may swap them: the tied ones are
then one cell. Without top-k all but the most likely tokens are that cell. Behind it nothing is told
apart. Knows log-probabilities; judges nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.tools.generation_client import TextClient
from specserve.tools.verify.short_texts import Law

TOP_K = 3
"""Of the requests that have one; of the others, tokens that are told apart."""

LENGTH = 3
"""Tokens that are told; whoever draws decodes more, so that these are decided in whole rounds."""

REST = -1
"""Stands for any token of a tie at the cut, or for any that is not told, and all that follows."""

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What may come after one prefix."""

    probs: dict[int, float]
    """By token, REST for those that are one cell; the sum is 1."""
    tied: frozenset[int]
    """The tokens of a tie, inside and outside; empty where the cut is clear, or there is none."""
    has_cut: bool = True
    """Tokens that are not named have probability 0; else they are the rest."""

    def is_rest(self, token_id: int) -> bool:
        """Whether a token belongs to the cell behind which nothing is told apart."""
        return token_id in self.tied or not (self.has_cut or token_id in self.probs)


@dataclass(frozen=True, slots=True)
class ToldLaw:
    """The law of all short texts after one prompt."""

    probs: Law
    """By the first LENGTH tokens, REST from the first one of that cell on."""
    steps: dict[Text, Step]
    """What comes after each prefix that was asked about."""

    def cell_of(self, token_ids: Sequence[int]) -> Text:
        """Return the key of a text in `probs`; one that is not there if the law excludes it."""
        for place in range(LENGTH):
            prefix = tuple(token_ids[:place])
            if prefix not in self.steps:
                break  # behind a token that cannot be
            if self.steps[prefix].is_rest(token_ids[place]):
                return (*prefix, *[REST] * (LENGTH - place))
        return tuple(token_ids[:LENGTH])


async def told_law(
    client: TextClient,
    prompt: Text,
    tie_margin: float,
    concurrency: int,
    name: str,
    *,
    has_cut: bool = True,
) -> ToldLaw:
    """Ask the target, without any draft, for the law of the first LENGTH tokens.

    Args:
        name: of the requests.
        has_cut: texts are drawn with TOP_K; else from the whole vocabulary.
    """
    slots = asyncio.Semaphore(concurrency)

    async def ask(prefix: Text) -> Step:
        async with slots:
            request_id = f"law-{name}-{'-'.join(map(str, prefix))}"
            told = await client.candidates((*prompt, *prefix), request_id)
        return step_of(told, tie_margin) if has_cut else open_step_of(told)

    steps: dict[Text, Step] = {}
    law: Law = {(): 1.0}
    for _ in range(LENGTH):
        prefixes = [prefix for prefix in law if REST not in prefix]
        steps |= dict(zip(prefixes, await asyncio.gather(*map(ask, prefixes)), strict=True))
        law = {
            (*prefix, token_id): weight * p
            for prefix, weight in law.items()
            for token_id, p in (steps[prefix].probs if prefix in steps else {REST: 1.0}).items()
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
    merged[REST] = sum(probs[t] for t in may_go)
    return Step(merged, frozenset((*may_go, *may_come)))


def open_step_of(told: dict[int, float]) -> Step:
    """Tell the TOP_K most likely tokens apart and leave the others together, at temperature 1.

    Args:
        told: log-probabilities over the whole vocabulary, of TOP_K tokens at least.
    """
    ranked = sorted(told, key=lambda token_id: (-told[token_id], token_id))
    probs = {token_id: float(np.exp(told[token_id])) for token_id in ranked[:TOP_K]}
    probs[REST] = max(0.0, 1.0 - sum(probs.values()))
    return Step(probs, frozenset(), has_cut=False)
