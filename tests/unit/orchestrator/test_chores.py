"""What waits until a call has left: done behind its frame, once, and at the latest when asked."""

from __future__ import annotations

import asyncio

from specserve.orchestrator.chores import Chores
from specserve.rpc.link_outbox import LinkOutbox


async def test_chores_are_done_behind_the_frame_of_the_call_that_was_sent():
    chores, outbox = Chores(), LinkOutbox[str]()
    done: list[object] = []

    async def write() -> None:
        done.append((await outbox.next_frame(lambda **frame: frame["calls"], ()))[0])

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)  # it waits for something to write
    chores.add(lambda: done.append("first"))
    chores.add(lambda: done.append("second"))
    outbox.put("call")
    chores.call_sent()
    assert done == []
    await writer
    await asyncio.sleep(0)
    assert done == ["call", "first", "second"]


async def test_chores_that_were_done_are_not_done_again():
    chores, done = Chores(), list[int]()
    chores.add(lambda: done.append(1))
    chores.call_sent()
    chores.run()
    chores.add(lambda: done.append(2))
    await asyncio.sleep(0)
    chores.run()
    assert done == [1, 2]
