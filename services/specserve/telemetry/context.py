"""Where a request is in its trace: the W3C `traceparent`, read and written. Knows no exporter."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Self

_SAMPLED = 0x01

# Later versions may have more fields behind these four (W3C Trace Context, section 3.2.3).
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's place in a trace; it has one whether or not anything is exported."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""
    is_sampled: bool
    """Spans below are recorded while they happen."""

    @classmethod
    def parse(cls, traceparent: str) -> Self | None:
        """Read a header; None when it is empty or none, which starts a trace of its own."""
        match = _TRACEPARENT.fullmatch(traceparent.strip())
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16):
            return None
        if not int(span_id, 16):
            return None
        return cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))

    @property
    def traceparent(self) -> str:
        """The header for calls below this span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    @property
    def trace_id_text(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.trace_id:032x}"

    @property
    def span_id_text(self) -> str:
        """16 hexadecimal digits."""
        return f"{self.span_id:016x}"

    def child(self) -> TraceContext:
        """Make the context of a new span below this one."""
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled)


def new_span_id() -> int:
    """Draw a span id."""
    return random.getrandbits(64) or 1


def new_trace_id() -> int:
    """Draw a trace id."""
    return random.getrandbits(128) or 1
