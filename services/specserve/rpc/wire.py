"""What a replica must be told of its service: how calls and replies are written as protobuf.

Draft and target each implement it beside their servicer. Knows no stream and no device.
"""

from __future__ import annotations

from typing import Any, Protocol

from specserve.errors import SpecServeError
from specserve.model.messages import Call, Reply


class Wire(Protocol):
    """Translates one service's calls and replies."""

    span_name: str

    def unpack_call(self, message: Any, call_id: int) -> Call:
        """Read a call; `call_id` is the engine's own number for it.

        Raises:
            InvalidRequest: a field is wrong; it is named.
        """
        ...

    def pack_reply(self, reply: Reply, call_id: int) -> Any:
        """Write a reply; `call_id` is the caller's number for it."""
        ...

    def pack_failure(self, call_id: int, session_id: str, step: int, error: SpecServeError) -> Any:
        """Write the failure of one call."""
        ...

    def make_frame(self, **fields: Any) -> Any:
        """Make a reply frame."""
        ...
