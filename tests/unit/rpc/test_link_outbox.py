"""One frame holds what was said in a turn, in bounds; a call that was taken back is not in it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specserve.rpc import framing
from specserve.rpc.channel import MAX_FRAME_ITEMS
from specserve.rpc.link_outbox import LinkOutbox
from specserve.rpc.v1 import common_pb2, draft_pb2


def call(number: int) -> draft_pb2.ProposeCall:
    return draft_pb2.ProposeCall(session=common_pb2.SessionCall(call_id=number))


async def frame_of(outbox: LinkOutbox[draft_pb2.ProposeCall]) -> Any:
    return await outbox.next_frame(draft_pb2.ProposeFrame, {"held"})


async def test_frame_holds_all_that_is_due_and_the_next_waits() -> None:
    outbox: LinkOutbox[draft_pb2.ProposeCall] = LinkOutbox()
    outbox.put(call(1))
    outbox.cancel(7)
    outbox.release("s")
    outbox.beat()
    outbox.put(call(2))
    frame = await frame_of(outbox)
    assert [c.session.call_id for c in frame.calls] == [1, 2]
    assert [c.call_id for c in frame.cancels] == [7]
    assert [r.session_id for r in frame.releases] == ["s"]
    assert list(frame.heartbeat.session_ids) == ["held"]
    assert not outbox.is_due
    waiting = asyncio.create_task(frame_of(outbox))
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.flush()
    assert await waiting == draft_pb2.ProposeFrame()


async def test_more_calls_than_a_frame_holds_go_out_in_order() -> None:
    outbox: LinkOutbox[draft_pb2.ProposeCall] = LinkOutbox()
    for number in range(MAX_FRAME_ITEMS + 1):
        outbox.put(call(number))
    first, second = await frame_of(outbox), await frame_of(outbox)
    assert len(first.calls) == MAX_FRAME_ITEMS
    assert [c.session.call_id for c in second.calls] == [MAX_FRAME_ITEMS]
    assert not outbox.is_due


async def test_calls_that_are_large_together_go_out_in_frames_of_bounded_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None makes a message that the peer refuses; what is larger by itself goes alone, in order."""
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 1000)
    outbox: LinkOutbox[draft_pb2.ProposeCall] = LinkOutbox()
    sizes = [400, 400, 400, 5000, 5000, 100, 100]
    for number, size in enumerate(sizes, 1):
        session = common_pb2.SessionCall(call_id=number, append_token_ids=bytes(size))
        outbox.put(draft_pb2.ProposeCall(session=session))
    frames = []
    while outbox.is_due:
        frames.append(await frame_of(outbox))

    numbers = [[c.session.call_id for c in frame.calls] for frame in frames]
    assert numbers == [[1, 2], [3], [4], [5], [6, 7]]


async def test_call_is_taken_back_only_before_it_left() -> None:
    """By identity: an equal call of another session stays."""
    outbox: LinkOutbox[draft_pb2.ProposeCall] = LinkOutbox()
    one, twin = call(1), call(1)
    outbox.put(one)
    outbox.put(twin)
    assert outbox.withdraw(one)
    frame = await frame_of(outbox)
    assert len(frame.calls) == 1
    assert not outbox.withdraw(twin)


async def test_new_stream_carries_open_calls_and_unwritten_releases() -> None:
    """A cancel belonged to the stream that is gone; a release is owed as long as sessions live."""
    outbox: LinkOutbox[draft_pb2.ProposeCall] = LinkOutbox()
    outbox.put(call(1))
    outbox.cancel(1)
    outbox.release("s")
    outbox.restart([call(5)])
    frame = await frame_of(outbox)
    assert [c.session.call_id for c in frame.calls] == [5]
    assert not frame.cancels
    assert [r.session_id for r in frame.releases] == ["s"]
    outbox.release("t")
    outbox.forget_releases()
    assert not (await frame_of(outbox)).releases
