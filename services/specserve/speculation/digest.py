"""A chained 64-bit digest of token prefixes: makes stale cache content an error.

digest(n) covers tokens[:n]. Whole pieces of 64 tokens are hashed once and remembered; only the tail
is hashed on demand, so a prefix of 64k tokens costs a microsecond or two. It guards against
mistakes, not against an adversary. Knows tokens; knows no cache and no network.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b

PIECE_NUM_TOKENS = 64


class TokenChain:
    """The tokens of one session with digests of their prefixes."""

    __slots__ = ("_last", "_piece_digests", "_tokens")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._tokens = array("i", token_ids)
        self._piece_digests: list[bytes] = []
        self._last = (0, 0)
        """The last length asked for, and its digest: draft and target mostly hold as much."""

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """All tokens, as a new list."""
        return self._tokens.tolist()

    def slice(self, start: int, stop: int) -> list[int]:
        """Return tokens[start:stop] as a new list."""
        return self._tokens[start:stop].tolist()

    def append(self, token_ids: Iterable[int]) -> None:
        """Add tokens at the end; each fits a signed 32-bit integer."""
        self._tokens.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; a length beyond the end is a mistake of the caller."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot keep {length} of {len(self._tokens)} tokens")
        del self._tokens[length:]
        del self._piece_digests[length // PIECE_NUM_TOKENS :]
        if self._last[0] > length:
            self._last = (0, 0)

    def digest(self, length: int) -> int:
        """Return the unsigned 64-bit digest of tokens[:length]; 0 for length 0."""
        if length == self._last[0]:
            return self._last[1]
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"no digest of {length} tokens: {len(self._tokens)} are held")
        if length == 0:
            return 0
        num_pieces, rest = divmod(length, PIECE_NUM_TOKENS)
        pieces = self._piece_digests
        while len(pieces) < num_pieces:
            start = len(pieces) * PIECE_NUM_TOKENS
            pieces.append(self._hash(start, start + PIECE_NUM_TOKENS))
        whole = self._hash(length - rest, length) if rest else pieces[num_pieces - 1]
        self._last = (length, int.from_bytes(whole, "little"))
        return self._last[1]

    def matching_length(self, keep_length: int, keep_digest: int) -> int:
        """Say how many of the tokens a caller wants kept are surely the same here.

        Returns:
            keep_length when the digests agree; all tokens held when fewer are (the caller proves
            them with its next keep_digest); 0 when the content differs: nothing here tells where.
        """
        if keep_length > len(self._tokens):
            return len(self._tokens)
        return keep_length if self.digest(keep_length) == keep_digest else 0

    def _hash(self, start: int, stop: int) -> bytes:
        """Hash tokens[start:stop] onto the piece before; start is a multiple of a piece."""
        piece = self._tokens[start:stop]
        if sys.byteorder == "big":
            piece.byteswap()  # peers may differ: little-endian on both sides
        previous = self._piece_digests[start // PIECE_NUM_TOKENS - 1] if start else b""
        return blake2b(previous + piece.tobytes(), digest_size=8).digest()
