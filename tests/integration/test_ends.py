"""Every end at every place of a block: ids, text, log-probabilities and counts are cut alike."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from helpers.pair import greedy_tokens, make_request, running_pair
from specserve.model.toy import ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer
from specserve.rpc.v1 import generation_pb2

TARGET = "toy:vocab_size=48,seed=7,order=8"
PROMPT = (5, 6, 7, 5, 6)
LONGEST = 22
TRUTH = greedy_tokens(TARGET, PROMPT, LONGEST)
BYTES = ToyTokenizer(ToySpec.parse(TARGET)).token_table().token_bytes
STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH


@dataclass(frozen=True, slots=True)
class End:
    """A request that ends in a known place."""

    name: str
    num_tokens: int
    reason: int
    fields: dict[str, Any] = field(default_factory=dict)
    num_hidden_bytes: int = 0
    """Bytes at the end that are no text: a stop string's."""


def text_of(num_tokens: int) -> bytes:
    """Return the text of the first tokens; EOS has none."""
    return b"".join(BYTES[token] for token in TRUTH[:num_tokens] if token != 0)


def stop_id_ends() -> list[End]:
    """Each id that comes for the first time at its place, with max_tokens before, on and after."""
    ends = []
    for place in range(1, LONGEST - 1):
        token = TRUTH[place]
        if TRUTH.index(token) != place or token == 0:
            continue
        for max_tokens in (place, place + 1, place + 2):
            stopped = max_tokens > place
            ends.append(
                End(
                    f"stop id at {place}, max_tokens {max_tokens}",
                    min(place + 1, max_tokens),
                    STOP if stopped else LENGTH,
                    {"stop_token_ids": [token], "max_tokens": max_tokens},
                )
            )
    return ends


def stop_string_ends() -> list[End]:
    """Two tokens' bytes that come for the first time at their place."""
    ends = []
    for place in range(1, LONGEST - 1):
        stop = BYTES[TRUTH[place - 1]] + BYTES[TRUTH[place]]
        if 0 in TRUTH[place - 1 : place + 1] or text_of(place + 1).find(stop) != (
            len(text_of(place + 1)) - len(stop)
        ):
            continue
        for max_tokens in (place, place + 1, place + 2):
            stopped = max_tokens > place
            ends.append(
                End(
                    f"stop string at {place}, max_tokens {max_tokens}",
                    min(place + 1, max_tokens),
                    STOP if stopped else LENGTH,
                    {"stop": [stop], "max_tokens": max_tokens},
                    len(stop) if stopped else 0,
                )
            )
    return ends


def limit_ends() -> list[End]:
    """max_tokens at every place, EOS where the model says it."""
    eos = TRUTH.index(0)
    return [
        *(End(f"max_tokens {n}", n, LENGTH, {"max_tokens": n}) for n in range(1, LONGEST + 1)),
        End("eos", eos + 1, STOP, {"max_tokens": LONGEST, "ignore_eos": False}),
        End("eos and its limit", eos + 1, STOP, {"max_tokens": eos + 1, "ignore_eos": False}),
        End("eos after the limit", eos, LENGTH, {"max_tokens": eos, "ignore_eos": False}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ["perfect draft", "poor draft"])
async def test_every_end_at_every_place_of_a_block_cuts_everything_alike(rounds: str) -> None:
    """B041, B044, B053: stop ids, stop strings, EOS and max_tokens, K = 0, 3 and 8, pairwise."""
    draft = TARGET if rounds == "perfect draft" else f"{TARGET},noise=0.7,noise_seed=1"
    num_drafted = 0
    async with running_pair(TARGET, draft, k=8) as pair:

        async def check(end: End, k: int) -> None:
            nonlocal num_drafted
            answer = await pair.generate(make_request(PROMPT, k=k, num_logprobs=1, **end.fields))
            case = f"{end.name}, K = {k}"
            assert answer.token_ids == TRUTH[: end.num_tokens], case
            assert answer.finish_reason == end.reason, case
            text = text_of(end.num_tokens)
            assert answer.text == text[: len(text) - end.num_hidden_bytes], case
            assert len(answer.logprobs) == len(answer.origins) == end.num_tokens, case
            record = answer.record
            assert record is not None
            counted = record.num_plain_tokens + record.num_accepted_draft_tokens
            counted += record.num_recovered_tokens + record.num_bonus_tokens
            assert counted == end.num_tokens, case
            num_drafted += record.num_draft_tokens

        ends = [*stop_id_ends(), *stop_string_ends(), *limit_ends()]
        for k in (0, 3, 8):
            await asyncio.gather(*(check(end, k) for end in ends))
        await pair.until_idle()
    assert num_drafted > 5 * len(ends)


@pytest.mark.slow
@pytest.mark.parametrize("room", range(1, 12))
async def test_the_context_s_end_meets_every_other_end(room: int) -> None:
    """B082, B083, B086: stop ids before, on and after a context's end at each place of a block.

    The first token comes with the prompt, a block of K = 8 holds nine more: every alignment.
    """
    fields: dict[str, object] = {"max_model_len": len(PROMPT) + room}
    async with running_pair(TARGET, TARGET, k=8, target_fields=fields, draft_fields=fields) as pair:
        for k in (0, 3, 8):
            for place in sorted({0, room // 2, room - 1, room, room + 1} & set(range(LONGEST))):
                first = TRUTH.index(TRUTH[place])
                answer = await pair.generate(
                    make_request(PROMPT, k=k, max_tokens=100, stop_token_ids=[TRUTH[place]])
                )
                stopped = first < room
                assert answer.token_ids == TRUTH[: first + 1 if stopped else room]
                assert answer.finish_reason == (STOP if stopped else LENGTH)
        await pair.until_idle()
