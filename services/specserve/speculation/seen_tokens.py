"""How often each token was seen, taken in and taken back one by one. Knows ids; knows no rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class SeenTokens:
    """Distinct tokens in the order they came first, and how often each was pushed."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        """Begin with the tokens of a prompt, pushed 0 times."""
        ids = np.unique(np.array(prompt, np.int64))
        self._num_prompt = self._size = ids.size
        self._ids = np.concatenate((ids, np.zeros(64, np.int64)))
        self._counts = np.zeros(self._ids.size, np.int64)
        self._place_of = {token_id: place for place, token_id in enumerate(ids.tolist())}

    def push(self, token_id: int) -> None:
        """Count one more."""
        place = self._place_of.get(token_id)
        if place is None:
            place = self._size
            if place == self._ids.size:
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place], self._counts[place] = token_id, 0
            self._place_of[token_id] = place
            self._size += 1
        self._counts[place] += 1

    def pop(self, token_id: int) -> None:
        """Undo the last push, which was of this token."""
        place = self._place_of[token_id]
        self._counts[place] -= 1
        if place >= self._num_prompt and self._counts[place] == 0:
            # It came first after all that are left: its place is the last one.
            del self._place_of[token_id]
            self._size -= 1

    def table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids and their counts, which no later push or pop changes."""
        return self._ids[: self._size].copy(), self._counts[: self._size].copy()
