"""Proposers: how draft tokens are guessed without a model. Pure; knows token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specserve.speculation.types import SparseProbs


class Proposer(Protocol):
    """Guess the tokens that follow a sequence."""

    def propose(self, token_ids: Sequence[int], num_speculative_tokens: int) -> list[int]:
        """Return at most `num_speculative_tokens` guesses; fewer, or none, are fine.

        The guess may depend on committed tokens alone.
        """
        ...


class NgramProposer:
    """Prompt lookup: continue as the sequence did after its last n-gram occurred before."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n

    def propose(self, token_ids: Sequence[int], num_speculative_tokens: int) -> list[int]:
        """Return what followed the most recent longest match of the sequence's end."""
        return ngram_propose(token_ids, num_speculative_tokens, self._min_n, self._max_n)


def ngram_propose(
    token_ids: Sequence[int], num_speculative_tokens: int, min_n: int, max_n: int
) -> list[int]:
    """Continue a sequence by looking its own ending up in it.

    The longest ending of min_n..max_n tokens that occurs earlier wins; among equally long ones the
    most recent. The continuation may run into the ending itself (a loop goes on looping).

    Returns:
        At most num_speculative_tokens ids; empty when nothing matches.
    """
    if num_speculative_tokens < 1:
        return []
    tokens = np.asarray(token_ids, dtype=np.int64)  # [n]
    longest = min(max_n, len(tokens) - 1)
    if longest < min_n:
        return []
    # ends[i]: an occurrence of the ending of length n is at tokens[i - n + 1 .. i], i < last.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # [m]
    best = -1
    for n in range(1, longest + 1):
        if n > 1:
            ends = ends[ends >= n - 1]
            ends = ends[tokens[ends - (n - 1)] == tokens[-n]]
        if len(ends) == 0:
            break
        if n >= min_n:
            best = int(ends[-1])
    if best < 0:
        return []
    guess = [int(token) for token in tokens[best + 1 : best + 1 + num_speculative_tokens]]
    # The match lies `period` tokens back, so what comes after the end repeats with that period.
    period = len(tokens) - 1 - best
    while len(guess) < num_speculative_tokens:
        guess.append(guess[-period])
    return guess


def one_hot(token_ids: Sequence[int]) -> SparseProbs:
    """Return q of a deterministic guess: all weight on the guessed id (exact under `standard`)."""
    return SparseProbs(
        np.asarray(token_ids, dtype=np.int32).reshape(-1, 1),
        np.ones((len(token_ids), 1), dtype=np.float32),
    )
