"""What tells a link to a draft from a link to a target: the stub, the method, the frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")


class FrameStub(Protocol):
    """The generated stub of a draft or target, as far as a link needs it."""

    GetModel: Any


class LinkKind(Generic[CallT, ReplyT]):
    """One service, as its links speak to it."""

    def __init__(
        self,
        pool: str,
        make_stub: Callable[[Any], FrameStub],
        stream_method: str,
        make_frame: Callable[..., Any],
    ) -> None:
        self.pool = pool
        """draft or target, for messages and metrics."""
        self.make_stub = make_stub
        self.stream_method = stream_method
        self.make_frame = make_frame
