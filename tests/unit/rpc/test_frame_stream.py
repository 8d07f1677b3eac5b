"""A stream's replies go out in order, in frames that the caller takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specserve.model.messages import EngineLoad
from specserve.rpc import framing
from specserve.rpc.frame_stream import FrameStream
from specserve.rpc.v1 import draft_pb2


class Context:
    """The caller's end: takes frames until so many replies have come."""

    def __init__(self, num_replies: int) -> None:
        self.frames: list[draft_pb2.ProposeReplyFrame] = []
        self.came = asyncio.Event()
        self._num_replies = num_replies

    async def write(self, frame: draft_pb2.ProposeReplyFrame) -> None:
        self.frames.append(frame)
        if sum(len(frame.replies) for frame in self.frames) == self._num_replies:
            self.came.set()


async def nothing() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


async def test_replies_that_are_large_together_go_out_in_frames_of_bounded_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 of the largest q would make a message that the caller refuses."""
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 1000)
    stream = FrameStream(draft_pb2.ProposeReplyFrame)
    for number, size in enumerate([400, 400, 400, 5000, 100, 100], 1):
        stream.push(draft_pb2.ProposeReply(call_id=number, support_weights=bytes(size)))
    context: Any = Context(num_replies=6)
    await asyncio.wait_for(
        stream.run(
            nothing(),
            context,
            take=lambda frame: None,
            load=lambda: EngineLoad(1, 1, 0, 0, 0),
            stopping=context.came,
        ),
        5,
    )

    numbers = [[reply.call_id for reply in frame.replies] for frame in context.frames]
    assert numbers == [[1, 2], [3], [4], [5, 6]]
