"""Bytes to text, piece by piece, without ever cutting a character.

Knows UTF-8; knows no tokens.
"""

from __future__ import annotations

import codecs


class IncrementalText:
    """The text of one choice.

    Bytes of an unfinished character are held until it is complete. Bytes that can never become a
    character are U+FFFD, and so is what is still unfinished at the end, once.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_chars = 0
        """Characters handed out so far."""

    def copy(self) -> IncrementalText:
        """Return another text that goes on from here."""
        other = IncrementalText()
        other._decoder.setstate(self._decoder.getstate())
        other.num_chars = self.num_chars
        return other

    @property
    def unfinished(self) -> bytes:
        """Bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]

    def append(self, data: bytes, final: bool = False) -> str:
        """Take the next bytes; return the characters that are now complete."""
        text = self._decoder.decode(data, final)
        self.num_chars += len(text)
        return text
