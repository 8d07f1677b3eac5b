"""Committed blocks on their way to the gateway: a round never waits for the one before to be sent.

While a write is under way further blocks of the same choice are joined into one response, so that a
busy orchestrator writes less often instead of falling behind. Knows protobuf; knows no transport.
"""

from __future__ import annotations

import asyncio

from specserve.rpc.v1 import generation_pb2


def join(first: generation_pb2.GenerateResponse, second: generation_pb2.GenerateResponse) -> None:
    """Append the blocks of `second` to `first`, as if they had been committed together."""
    first.prompt_logprobs.extend(second.prompt_logprobs)
    first.token_ids += second.token_ids
    first.text += second.text
    first.target_identity = first.target_identity or second.target_identity
    first.logprobs.extend(second.logprobs)
    first.origins.extend(second.origins)
    first.per_round_drafted.extend(second.per_round_drafted)
    first.per_round_proposer.extend(second.per_round_proposer)
    first.provenance.extend(second.provenance)
    first.num_device_deaths = max(first.num_device_deaths, second.num_device_deaths)
    first.finish_reason = second.finish_reason
    first.stop_index_plus_one = second.stop_index_plus_one
    if second.HasField("record"):
        first.record.CopyFrom(second.record)


class Outbox:
    """At most one response waits; one coroutine puts, one takes."""

    def __init__(self) -> None:
        self._waiting: generation_pb2.GenerateResponse | None = None
        self._closed = False
        self._wake = asyncio.Event()

    def put(self, response: generation_pb2.GenerateResponse) -> None:
        """Hand over a response; it may be joined to the one that waits."""
        if self._waiting is not None:
            join(self._waiting, response)
            return
        self._waiting = response
        # A turn later: the call of the next round, which the caller sends now, is written first.
        asyncio.get_running_loop().call_soon(self._wake.set)

    def close(self) -> None:
        """Say that nothing more comes."""
        self._closed = True
        self._wake.set()

    async def take(self) -> generation_pb2.GenerateResponse | None:
        """Wait for a response; None once all was taken and nothing more comes."""
        while self._waiting is None:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        response, self._waiting = self._waiting, None
        return response
