"""What travels beside a Generate call: the caller's trace, and how often it has tried before.

In the call's metadata, for neither is part of what is decoded. Knows names of keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from specserve.telemetry import TraceContext

TRACEPARENT_KEY = "traceparent"
ATTEMPT_KEY = "specserve-attempt"


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Where a Generate call comes from."""

    parent: TraceContext | None = None
    """The gateway's span; None where nobody sent one."""
    attempt: int = 0
    """How often the choice was sent before, to orchestrators that were lost."""

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, Any]] | None) -> Self:
        """Read a call's metadata; what is no context and no number counts as not sent."""
        found = {key: str(value) for key, value in metadata or ()}
        attempt = found.get(ATTEMPT_KEY, "")
        return cls(
            TraceContext.parse(found.get(TRACEPARENT_KEY, "")),
            int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) < 6 else 0,
        )

    def again(self) -> CallOrigin:
        """Write down one more attempt; a trace that a failover is in is kept from here on."""
        parent = self.parent
        if parent is not None:
            parent = replace(parent, is_sampled=True)
        return CallOrigin(parent, self.attempt + 1)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Write it for a call."""
        pairs = [] if self.parent is None else [(TRACEPARENT_KEY, self.parent.traceparent)]
        if self.attempt:
            pairs.append((ATTEMPT_KEY, str(self.attempt)))
        return tuple(pairs)
