"""How far an output has come in a grammar, token by token and back.

Knows one grammar's library state; knows no request and no logits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.row_edits import NO_IDS

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarMatcher:
    """A `TokenMatcher`. Behind EOS all is allowed: that text has ended, and nobody reads on.

    Behind a token that does not fit nothing is: such a row must never give a token.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Begin.

        Args:
            start: of the grammar, with nothing taken in; it stays so. Its id V accepts.
        """
        self._start = start
        self._state = start.deep_copy()
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._eos = np.array(sorted(self._eos_token_ids), np.int64)
        self._taken = array("i")
        """Tokens that the state has taken in."""
        self._num_behind = 0
        """Tokens behind those: EOS or one that does not fit, and all after it."""
        self._has_ended = False
        """Whether the first of these is an EOS that fits."""

    @property
    def is_stuck(self) -> bool:
        """Whether the vocabulary has nothing to go on with, and the text may not end either."""
        return not self._num_behind and not self._scan().any()

    def push(self, token_id: int) -> None:
        """Take one more token in."""
        if self._num_behind:
            self._num_behind += 1
        elif token_id in self._eos_token_ids:
            self._has_ended = self._scan()[self._vocab_size] != 0
            self._num_behind = 1
        elif self._takes(token_id):
            self._taken.append(token_id)
        else:
            self._has_ended = False
            self._num_behind = 1

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first tokens."""
        self._num_behind = min(self._num_behind, max(0, num_tokens - len(self._taken)))
        num_forgotten = len(self._taken) - num_tokens
        if num_forgotten > 0:
            del self._taken[num_tokens:]
            if not self._state.is_error() and self._state.rollback(num_forgotten):
                return
            # A state that had nowhere to go, or went over a limit, cannot be rolled back.
            self._state = self._start.deep_copy()
            self._state.consume_tokens(list(self._taken))

    def allowed_token_ids(self) -> NDArray[np.int64] | None:
        """Return the ascending ids that may come next; None for all."""
        if self._num_behind:
            return None if self._has_ended else NO_IDS
        bits = self._scan()
        # An EOS that the vocabulary does not mark as special would be a text like others.
        bits[self._eos] = bits[self._vocab_size]
        return np.flatnonzero(bits[: self._vocab_size])

    def _scan(self) -> NDArray[np.uint8]:
        """Return 1 for each id that may follow, [V + 1] and padding; id V for the end."""
        mask = self._state.compute_bitmask()
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        # A state with nowhere to go says so only now, and offers the end.
        return np.zeros_like(bits) if self._state.is_error() else bits

    def _takes(self, token_id: int) -> bool:
        state = self._state
        return (
            0 <= token_id < self._vocab_size
            and not state.is_error()
            and state.validate_tokens([token_id]) == 1
            and state.consume_token(token_id)
        )
