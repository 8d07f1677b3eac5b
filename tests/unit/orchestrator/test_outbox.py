"""The outbox: joined blocks say what the single ones would have said."""

from __future__ import annotations

import asyncio

from specserve.orchestrator.outbox import Outbox
from specserve.rpc import codec
from specserve.rpc.v1 import generation_pb2


def _block(*token_ids: int, text: bytes) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse(token_ids=codec.pack_ids(token_ids), text=text)
    for token_id in token_ids:
        response.logprobs.add(logprob=-float(token_id))
        response.origins.append(generation_pb2.TOKEN_ORIGIN_PLAIN)
    response.per_round_drafted.append(len(token_ids))
    response.per_round_proposer.append(generation_pb2.SPECULATIVE_METHOD_NGRAM)
    return response


async def test_blocks_that_wait_together_are_joined_in_order() -> None:
    """Ids, text, log-probabilities, origins, rounds, the finish and the record arrive, once."""
    outbox = Outbox()
    outbox.put(_block(1, 2, text=b"ab"))
    last = _block(3, text=b"c")
    last.finish_reason = generation_pb2.FINISH_REASON_STOP
    last.stop_index_plus_one = 2
    last.record.num_spec_steps = 7
    last.target_identity = "weights"
    outbox.put(last)
    outbox.close()

    joined = await outbox.take()

    assert joined is not None
    assert codec.unpack_ids(joined.token_ids, "token_ids") == (1, 2, 3)
    assert joined.text == b"abc"
    assert joined.target_identity == "weights"
    assert [entry.logprob for entry in joined.logprobs] == [-1.0, -2.0, -3.0]
    assert len(joined.origins) == 3
    assert list(joined.per_round_drafted) == [2, 1]
    assert list(joined.per_round_proposer) == [generation_pb2.SPECULATIVE_METHOD_NGRAM] * 2
    assert joined.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert joined.stop_index_plus_one == 2
    assert joined.record.num_spec_steps == 7
    assert await outbox.take() is None


async def test_a_reader_that_keeps_up_gets_every_block_by_itself() -> None:
    """Nothing is held back for joining, beyond the turn that the next round's call goes first."""
    outbox = Outbox()
    taken: list[bytes] = []

    async def read() -> None:
        while (response := await outbox.take()) is not None:
            taken.append(response.text)

    reader = asyncio.create_task(read())
    for text in (b"a", b"b", b"c"):
        outbox.put(_block(1, text=text))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    outbox.close()
    await reader

    assert taken == [b"a", b"b", b"c"]


async def test_what_is_sent_after_a_block_is_written_before_it() -> None:
    """The reader of a block comes after a task that was woken later: the next round's call."""
    outbox = Outbox()
    woken = asyncio.Event()
    order: list[str] = []

    async def take() -> None:
        await outbox.take()
        order.append("block")

    async def write() -> None:
        await woken.wait()
        order.append("call")

    tasks = [asyncio.create_task(take()), asyncio.create_task(write())]
    await asyncio.sleep(0)
    outbox.put(_block(1, text=b"a"))
    woken.set()
    await asyncio.gather(*tasks)

    assert order == ["call", "block"]
