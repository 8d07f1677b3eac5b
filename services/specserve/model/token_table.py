"""What every token id stands for, in bytes: the one thing a draft and a target must agree on.

Text of committed tokens is the concatenation of their bytes; stop strings and incremental
detokenisation work on these, never on a decoder's idea of whitespace. Knows no tokenizer library.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specserve.errors import InvalidRequest

_COUNT = struct.Struct("<I")


class TokenDifference(NamedTuple):
    """The first token id that two tables disagree on."""

    token_id: int
    ours: str
    """How this table reads the id."""
    theirs: str


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Bytes of each token id. Ids nobody uses are empty; trailing ones count as padding."""

    token_bytes: tuple[bytes, ...]
    """[V]; b"" for an id without text."""
    special_token_ids: frozenset[int]
    """Ids that are control marks rather than text; their bytes are their names."""
    fingerprint: str = field(init=False, compare=False)
    """Hex SHA-256 of ids, bytes and special ids; the same whatever the padding."""

    def __post_init__(self) -> None:
        used = self.token_bytes[: self._used_size()]
        digest = hashlib.sha256(_serialise(used, self.special_token_ids)).hexdigest()
        object.__setattr__(self, "fingerprint", digest)

    @property
    def vocab_size(self) -> int:
        """Ids in the table, padding included."""
        return len(self.token_bytes)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> bytes:
        """Concatenate the bytes of token_ids; they need not be whole UTF-8."""
        return b"".join(
            self.token_bytes[i]
            for i in token_ids
            if not (skip_special and i in self.special_token_ids)
        )

    def first_difference(self, other: TokenTable) -> TokenDifference | None:
        """Find the first id that means something else in the other table; None when they agree.

        Padding is no difference: one table may be longer by ids that are empty and not special.
        """
        for token_id in range(max(self.vocab_size, other.vocab_size)):
            ours, theirs = self._entry(token_id), other._entry(token_id)
            if ours != theirs:
                return TokenDifference(
                    token_id, self._describe(token_id), other._describe(token_id)
                )
        return None

    def to_bytes(self) -> bytes:
        """Serialise, little endian: count, (length, bytes) of each id, count, each special id."""
        return _serialise(self.token_bytes, self.special_token_ids)

    @staticmethod
    def from_bytes(data: bytes) -> TokenTable:
        """Read what `to_bytes` wrote.

        Raises:
            InvalidRequest: the data is cut short, too long, or names ids that are not there.
        """
        try:
            (count,) = _COUNT.unpack_from(data, 0)
            offset = _COUNT.size
            texts = []
            for _ in range(count):
                (length,) = _COUNT.unpack_from(data, offset)
                offset += _COUNT.size
                texts.append(data[offset : offset + length])
                offset += length
            (count,) = _COUNT.unpack_from(data, offset)
            special = frozenset(struct.unpack_from(f"<{count}I", data, offset + _COUNT.size))
            offset += _COUNT.size * (1 + count)
        except (struct.error, OverflowError, MemoryError) as error:
            raise InvalidRequest("token_table", f"damaged: {error}") from error
        if offset != len(data) or any(i >= len(texts) for i in special):
            raise InvalidRequest("token_table", f"{len(data)} bytes do not make a table")
        return TokenTable(tuple(texts), special)

    def _used_size(self) -> int:
        """Return the size without trailing padding."""
        size = len(self.token_bytes)
        while size and not self.token_bytes[size - 1] and size - 1 not in self.special_token_ids:
            size -= 1
        return size

    def _entry(self, token_id: int) -> tuple[bytes, bool]:
        text = self.token_bytes[token_id] if token_id < self.vocab_size else b""
        return text, token_id in self.special_token_ids

    def _describe(self, token_id: int) -> str:
        text, special = self._entry(token_id)
        if not text and not special:
            return "nothing"
        return f"{text!r} (special)" if special else repr(text)


def _serialise(token_bytes: Sequence[bytes], special_token_ids: frozenset[int]) -> bytes:
    parts = [_COUNT.pack(len(token_bytes))]
    for text in token_bytes:
        parts += (_COUNT.pack(len(text)), text)
    special = sorted(special_token_ids)
    parts.append(struct.pack(f"<I{len(special)}I", len(special), *special))
    return b"".join(parts)
