"""The one trimming point: where EOS, stops, max_tokens and the context's end cut a text.

Works token by token over committed tokens, so that ids, text, log-probabilities and counts all end
at the same place whatever the alignment inside a block. Stop strings are matched on bytes. The
rule: the token that completes a stop counts as output (ids, log-probabilities, usage); the text
ends before the first byte of a stop string, and the bytes of special tokens (EOS among them) are no
text unless asked for. Until min_tokens are out no stop string ends the text (and the target emits
no EOS and no stop id); one that is completed later may have begun before. A token is checked for
stops before it is checked against limits.

Knows bytes and ids; knows no model and no rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


class Emission(NamedTuple):
    """What one committed block adds to the output."""

    num_tokens: int
    """Tokens of the block that are output; the rest is cut."""
    text: bytes
    """Bytes that are now certain."""
    finish_reason: FinishReason | None
    stop_index: int | None
    """Which stop string ended the text."""


class Trimmer:
    """Cuts one choice's output."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        hidden_ids: Collection[int],
        stop_token_ids: Collection[int],
        stop: Sequence[bytes],
        max_tokens: int,
        min_tokens: int = 0,
    ) -> None:
        """Prepare.

        Args:
            token_bytes: [V] bytes of each token id.
            hidden_ids: special ids whose bytes are no text.
            stop_token_ids: ids that end the output (EOS among them unless ignored).
            stop: stop strings, non-empty.
            max_tokens: most output tokens; >= 1.
            min_tokens: a stop string that one of the first so many tokens completes ends nothing.
        """
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._stop_token_ids = stop_token_ids
        self._stop = tuple(stop)
        self._num_left = max_tokens
        self._num_early = min_tokens
        self._held = b""
        """Bytes that could still become part of a stop string."""

    def take(self, token_ids: Sequence[int]) -> Emission:
        """Take a committed block; nothing may be taken after an emission with a finish reason."""
        text = bytearray()
        for index, token_id in enumerate(token_ids):
            self._num_left -= 1
            self._num_early -= 1
            reason, stop_index = self._take_one(token_id, text)
            if reason is not None:
                return Emission(index + 1, bytes(text), reason, stop_index)
        return Emission(len(token_ids), bytes(text), None, None)

    def ends_within(self, token_ids: Sequence[int]) -> bool:
        """Say whether these tokens, taken next, would end the text."""
        return copy.copy(self).take(token_ids).finish_reason is not None

    def _take_one(self, token_id: int, text: bytearray) -> tuple[FinishReason | None, int | None]:
        shown = b"" if token_id in self._hidden_ids else self._bytes_of(token_id)
        if self._stop and shown:
            buffer = self._held + shown
            hit = None if self._num_early >= 0 else self._first_stop(buffer)
            if hit is not None:
                text += buffer[: hit[0]]
                self._held = b""
                return FinishReason.STOP, hit[1]
            keep = self._longest_open_suffix(buffer)
            text += buffer[: len(buffer) - keep]
            self._held = buffer[len(buffer) - keep :]
        else:
            text += shown
        if token_id in self._stop_token_ids:
            return self._end(text, FinishReason.STOP)
        if self._num_left <= 0:
            return self._end(text, FinishReason.LENGTH)
        return None, None

    def _first_stop(self, buffer: bytes) -> tuple[int, int] | None:
        """Find the first stop string that the bytes after `_held` complete, and where it begins."""
        held = len(self._held)
        hits = (
            (at, index)
            for index, s in enumerate(self._stop)
            if (at := buffer.find(s, max(0, held - len(s) + 1))) >= 0
        )
        return min(hits, default=None)

    def _bytes_of(self, token_id: int) -> bytes:
        # Padded embedding rows have no bytes; a target never emits them, a test's model may.
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def _end(self, text: bytearray, reason: FinishReason) -> tuple[FinishReason, None]:
        text += self._held
        self._held = b""
        return reason, None

    def _longest_open_suffix(self, buffer: bytes) -> int:
        """Length of the longest suffix of `buffer` that a stop string begins with."""
        longest = min(len(buffer), max(map(len, self._stop)) - 1)
        for size in range(longest, 0, -1):
            tail = buffer[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0
