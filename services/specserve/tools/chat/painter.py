"""Colours streamed text by where each token came from. Pure: text and tokens in, text out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from specserve.tools.chat.stream import StreamedToken
from specserve.tools.terminal import CYAN, DIM, GREEN, YELLOW, paint

ORIGIN_COLOURS = {"accepted": GREEN, "recovered": YELLOW, "bonus": CYAN, "plain": DIM}
"""{origin: colour}"""


class Painter:
    """Colours streamed text by the origin of its tokens.

    Text comes later than its tokens when a character is not yet whole, and special tokens have no
    text at all, so bytes are matched rather than counted.
    """

    def __init__(self, enabled: bool) -> None:
        self.counts = dict.fromkeys(ORIGIN_COLOURS, 0)
        """{origin: tokens}"""
        self._enabled = enabled
        self._bytes: deque[tuple[int, str]] = deque()  # (byte, origin) not yet seen in the text
        self._origin = ""

    def paint(self, text: str, tokens: Iterable[StreamedToken]) -> str:
        """Take new text and the tokens that came with it; return what to write."""
        for token in tokens:
            if token.origin in self.counts:
                self.counts[token.origin] += 1
            self._bytes.extend((byte, token.origin) for byte in token.text)
        if not self._enabled:
            return text
        painted = ""
        run, run_origin = "", self._origin
        for character in text:
            origin = self._take(character)
            if origin != run_origin:
                painted += paint(run, ORIGIN_COLOURS.get(run_origin, ""), bool(run_origin))
                run, run_origin = "", origin
            run += character
        return painted + paint(run, ORIGIN_COLOURS.get(run_origin, ""), bool(run_origin))

    def _take(self, character: str) -> str:
        """Find whose token a character begins in."""
        encoded = character.encode()
        if character == "\N{REPLACEMENT CHARACTER}":
            encoded = bytes(byte for byte, _ in list(self._bytes)[:1])
        elif encoded[0] in (byte for byte, _ in self._bytes):
            while self._bytes[0][0] != encoded[0]:
                self._bytes.popleft()
        else:
            return self._origin
        for position in range(min(len(encoded), len(self._bytes))):
            _, origin = self._bytes.popleft()
            if position == 0:
                self._origin = origin
        return self._origin
