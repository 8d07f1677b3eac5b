"""Guesses made from tokens alone: what a model-free proposer gives, and the q that goes with it.

A guess depends on committed tokens only and is the same every time, so q has all its weight on the
guessed token. Knows numpy; knows no model and no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specserve.speculation.types import AcceptanceRule, Proposal, SparseProbs


@dataclass(frozen=True, slots=True)
class Guess:
    """The tokens that may follow a text."""

    token_ids: tuple[int, ...]
    """At most as many as were asked for; may be empty."""
    probs: tuple[float, ...]
    """Estimated probability, by counting, that the guess holds up to and with each token."""
    match_length: int
    """Tokens of the text's ending that were found again; 0 when there is no guess."""

    @property
    def score(self) -> float:
        """Expected number of accepted tokens, by the estimate."""
        return sum(self.probs)

    def proposal(self, rule: AcceptanceRule) -> Proposal:
        """Give the guess as a proposal, with its q where the rule needs one."""
        needs_q = self.token_ids and rule is AcceptanceRule.STANDARD
        return Proposal(self.token_ids, one_hot(self.token_ids) if needs_q else None)


NO_GUESS = Guess((), (), 0)


class Guesser(Protocol):
    """Continues one text."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in committed tokens that follow those before."""
        ...

    def guess(self, num_speculative_tokens: int) -> Guess:
        """Guess at most `num_speculative_tokens` tokens after the last one taken in."""
        ...


def one_hot(token_ids: Sequence[int]) -> SparseProbs:
    """Return q of a deterministic guess: all weight on the guessed id (exact under `standard`)."""
    return SparseProbs(
        np.asarray(token_ids, dtype=np.int32).reshape(-1, 1),
        np.ones((len(token_ids), 1), dtype=np.float32),
    )
