"""Decodes all choices of one body at once and hands their blocks on as they come.

Each choice is read as fast as it is decoded, into memory bounded by max_tokens: a client that
reads slowly holds no KV. Knows the backend and text; knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import numpy as np

from specserve.errors import PeerUnavailable
from specserve.gateway.backend import GenerationBackend
from specserve.gateway.blocks import (
    Block,
    FinishReason,
    TokenLogprobs,
    unpack_origins,
    unpack_rounds,
)
from specserve.gateway.detokenizer import IncrementalText
from specserve.gateway.drain import Drain
from specserve.gateway.observer import RequestObserver
from specserve.gateway.plan import GenerationPlan
from specserve.gateway.prompt_view import PromptView
from specserve.rpc.codec import unpack_array, unpack_ids
from specserve.rpc.v1 import generation_pb2
from specserve.rpc.v1.generation_pb2 import GenerateRequest, GenerateResponse

_FINISH: dict[int, FinishReason] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


@asynccontextmanager
async def decoding(
    backend: GenerationBackend,
    plan: GenerationPlan,
    observer: RequestObserver,
    drain: Drain,
) -> AsyncIterator[AsyncGenerator[Block, None]]:
    """Decode all choices at once; the blocks of different choices come interleaved.

    Leaving the context gives up what is not finished, and waits until the backend has let go. The
    first choice that fails ends the blocks with its error; so does a gateway that stops, once its
    requests have had their time.
    """
    blocks: asyncio.Queue[Block | Exception] = asyncio.Queue()
    tasks = [
        asyncio.create_task(
            _decode(backend, request, index, plan.prompts[index // plan.n], observer, blocks)
        )
        for index, request in enumerate(plan.choices)
    ]
    tasks.append(asyncio.create_task(_give_up(drain, blocks)))
    try:
        yield _in_order_of_arrival(blocks, len(plan.choices))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _in_order_of_arrival(
    blocks: asyncio.Queue[Block | Exception], num_running: int
) -> AsyncGenerator[Block, None]:
    while num_running:
        block = await blocks.get()
        if isinstance(block, Exception):
            raise block
        num_running -= block.finish_reason is not None
        yield block


async def _give_up(drain: Drain, blocks: asyncio.Queue[Block | Exception]) -> None:
    await drain.until_given_up()
    blocks.put_nowait(drain.error())


async def _decode(
    backend: GenerationBackend,
    request: GenerateRequest,
    index: int,
    prompt: PromptView,
    observer: RequestObserver,
    blocks: asyncio.Queue[Block | Exception],
) -> None:
    text = IncrementalText()
    text.append(prompt.unfinished)
    try:
        async with aclosing(backend.generate(request, observer.traceparent)) as responses:
            async for response in responses:
                with observer.detokenising():
                    block = _to_block(index, text, response)
                observer.on_block(block)
                blocks.put_nowait(block)
                if block.finish_reason is not None:
                    return
        raise PeerUnavailable("orchestrator", "the stream ended without a finish reason")
    except Exception as error:  # noqa: BLE001
        # Handed to whoever reads the blocks; cancellation goes its own way.
        blocks.put_nowait(error)


def _to_block(index: int, text: IncrementalText, response: GenerateResponse) -> Block:
    finish_reason = _FINISH.get(response.finish_reason)
    return Block(
        index=index,
        text=text.append(response.text, final=finish_reason is not None),
        token_ids=unpack_ids(response.token_ids, "token_ids"),
        logprobs=tuple(map(_to_logprobs, response.logprobs)),
        origins=unpack_origins(response.origins),
        rounds=unpack_rounds(response),
        provenance=tuple(response.provenance),
        finish_reason=finish_reason,
        record=response.record if response.HasField("record") else None,
        prompt_logprobs=tuple(map(_to_logprobs, response.prompt_logprobs)),
    )


def _to_logprobs(message: generation_pb2.TokenLogprob) -> TokenLogprobs:
    ids = unpack_ids(message.top_token_ids, "top_token_ids")
    values = unpack_array(message.top_logprobs, np.float32, "top_logprobs").tolist()
    return TokenLogprobs(message.logprob, tuple(zip(ids, values, strict=True)))
