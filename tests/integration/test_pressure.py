"""Too few KV blocks for what is asked: sessions lose theirs, come back, and leave none behind."""

from __future__ import annotations

import asyncio
import itertools
import random

import grpc
import pytest

from helpers.pair import greedy_tokens, make_request, running_pair
from specserve.rpc.v1 import generation_pb2

TARGET = "toy:vocab_size=48,seed=7,order=8"
NUM_REQUESTS = 120
NUM_AT_ONCE = 16
FIELDS: dict[str, object] = {"max_model_len": 160, "num_kv_blocks": 40, "block_size": 16}
"""Room for four of the longest sequences."""


def requests(seed: int) -> list[generation_pb2.GenerateRequest]:
    """Make requests of all lengths; most repeat one token, so that they share what is cached."""
    chance = random.Random(seed)
    made = []
    for _ in range(NUM_REQUESTS):
        length = chance.choice([1, 20, 60, 100, 140])
        prompt = [chance.randrange(1, 48) for _ in range(length)]
        request = make_request(
            [5] * length if chance.random() < 0.8 else prompt,
            k=chance.choice([0, 1, 4]),
            max_tokens=chance.choice([4, 20]),
            method=chance.choice([None, "ngram", "suffix", "cascade"]),
        )
        request.num_prompt_logprobs_plus_one = chance.choice([0, 0, 1, 4])
        made.append(request)
    return made


@pytest.mark.slow
async def test_sessions_that_lose_their_blocks_leave_none_behind_B079() -> None:
    """Preempted, reopened, cancelled: every answer is right, and every block is free at the end."""
    async with running_pair(
        TARGET, f"{TARGET},noise=0.7,noise_seed=1", target_fields=FIELDS, draft_fields=FIELDS
    ) as pair:
        waiting = iter(enumerate(requests(seed=1)))
        num_finished = num_reopened = 0

        async def work() -> None:
            nonlocal num_finished, num_reopened
            for number, request in waiting:
                if number % 5 == 4:
                    call = pair.stub.Generate(request)
                    await call.read()
                    call.cancel()
                    assert await call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.OK)
                    continue
                prompt = [*memoryview(request.prompt_token_ids).cast("i")]
                answer = await pair.generate(request)
                assert answer.token_ids == greedy_tokens(TARGET, prompt, request.max_tokens)
                assert answer.record is not None
                num_finished += 1
                num_reopened += answer.record.num_target_reopens

        await asyncio.gather(*itertools.starmap(work, [()] * NUM_AT_ONCE))
        await pair.until_idle(within_s=30)
    assert num_finished == NUM_REQUESTS * 4 // 5
    assert num_reopened > 0
