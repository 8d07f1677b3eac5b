"""Prompt lookup: continue as the text did after its last n-gram occurred before.

After Saxena's prompt lookup decoding and vLLM's `ngram` method. Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.guess import NO_GUESS, Guess


class NgramGuesser:
    """Looks the ending of one text up in the text itself (a `Guesser`)."""

    def __init__(self, min_n: int, max_n: int) -> None:
        """Prepare an empty text.

        Args:
            min_n: shortest ending that is looked up, at least 1.
            max_n: longest ending that is looked up.
        """
        self._min_n = min_n
        self._max_n = max_n
        self._buffer = np.empty(1024, np.int32)
        self._length = 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in committed tokens: O(1) each, amortised."""
        end = self._length + len(token_ids)
        if end > len(self._buffer):
            grown = np.empty(2 * end, np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = token_ids
        self._length = end

    def guess(self, num_speculative_tokens: int) -> Guess:
        """Return what followed the most recent longest match of the text's end."""
        return ngram_guess(
            self._buffer[: self._length], num_speculative_tokens, self._min_n, self._max_n
        )


def ngram_guess(
    tokens: NDArray[np.int32], num_speculative_tokens: int, min_n: int, max_n: int
) -> Guess:
    """Continue a text by looking its own ending up in it.

    The longest ending of min_n..max_n tokens that occurs earlier wins; among equally long ones the
    most recent. The continuation may run into the ending itself (a loop goes on looping).

    Args:
        tokens: [n] the text.

    Returns:
        Exactly num_speculative_tokens ids, or none when nothing matches. One example tells no
        frequency: every estimated probability is 1.
    """
    longest = min(max_n, len(tokens) - 1)
    if num_speculative_tokens < 1 or longest < min_n:
        return NO_GUESS
    # ends[i]: an occurrence of the ending of length n is at tokens[i - n + 1 .. i], i < last.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # [m]
    best, match_length = -1, 0
    for n in range(1, longest + 1):
        if n > 1:
            ends = ends[ends >= n - 1]
            ends = ends[tokens[ends - (n - 1)] == tokens[-n]]
        if len(ends) == 0:
            break
        if n >= min_n:
            best, match_length = int(ends[-1]), n
    if best < 0:
        return NO_GUESS
    guess = tokens[best + 1 : best + 1 + num_speculative_tokens].tolist()
    # The match lies `period` tokens back, so what comes after the end repeats with that period.
    period = len(tokens) - 1 - best
    while len(guess) < num_speculative_tokens:
        guess.append(guess[-period])
    return Guess(tuple(guess), (1.0,) * len(guess), match_length)
