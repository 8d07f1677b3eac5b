"""Log-probabilities of prompts and of emitted tokens: the target's own, whatever is speculated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.pair import Generated, make_request, make_target, port_of
from helpers.pair import running_pair as running_default_pair
from integration.test_sampling_options import COMPLETIONS, served
from specserve.model.toy import ToySpec, toy_logits
from specserve.rpc.codec import unpack_array, unpack_ids
from specserve.rpc.v1 import generation_pb2

TARGET = "toy:vocab_size=48,seed=7,order=8"
DRAFT = f"{TARGET},noise=0.7,noise_seed=1"
SPEC = ToySpec.parse(TARGET)
TOLERANCE = 1e-5
running_pair = partial(running_default_pair, TARGET, DRAFT)

# Longer than one block of draft tokens, and not a multiple of it.
LONG_PROMPT = [int(token) for token in np.random.default_rng(3).integers(1, 48, 150)]


def true_logprobs(tokens: Sequence[int], start: int) -> list[np.ndarray[Any, Any]]:
    """Return the log-probabilities of every token at each place from `start` on: plain numpy."""
    rows = []
    for place in range(start, len(tokens)):
        logits = np.asarray(toy_logits(SPEC, tokens[:place]), np.float64)
        rows.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    return rows


def check(
    logprobs: Sequence[generation_pb2.TokenLogprob],
    tokens: Sequence[int],
    start: int,
    num_top: int,
    case: str,
) -> None:
    """Compare what was told of the tokens from `start` on with the truth."""
    assert len(logprobs) == len(tokens) - start, case
    for place, told, row in zip(
        range(start, len(tokens)), logprobs, true_logprobs(tokens, start), strict=True
    ):
        assert abs(told.logprob - row[tokens[place]]) < TOLERANCE, (case, place)
        order = np.argsort(-row, kind="stable")[:num_top]
        assert unpack_ids(told.top_token_ids, "ids") == tuple(order), (case, place)
        top = unpack_array(told.top_logprobs, np.float32, "top")
        assert np.abs(top - row[order]).max(initial=0.0) < TOLERANCE, (case, place)


async def prompt_logprobs_of(
    call: Any, request: generation_pb2.GenerateRequest
) -> tuple[list[generation_pb2.TokenLogprob], Generated]:
    """Run a request; its prompt's log-probabilities all come before its first token."""
    told: list[generation_pb2.TokenLogprob] = []
    generated = Generated()
    async for response in call(request):
        assert not (response.prompt_logprobs and generated.token_ids)
        told += response.prompt_logprobs
        generated.add(response)
    return told, generated


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled", "standard"])
async def test_emitted_logprobs_are_the_target_s_at_every_row_B056(rule: str) -> None:
    """B055, B058: own rows in a mixed batch, for accepted, recovered and bonus tokens.

    Half of the requests ask for log-probabilities; they end at different steps.
    """
    num_drafted = 0
    async with running_pair(k=8) as pair:
        lengths = (1, 4, 9, 17, 30)
        asked = [
            (num_top, k, length)
            for index, length in enumerate(lengths)
            for k in (0, 1, 3, 4, 8)
            for num_top in ((0, 3, None)[index % 3], 1)
        ]
        prompts = [LONG_PROMPT[index : index + 6] for index in range(len(asked))]
        requests = [
            make_request(prompt, rule=rule, k=k, max_tokens=length, num_logprobs=num_top, seed=9)
            for prompt, (num_top, k, length) in zip(prompts, asked, strict=True)
        ]
        answers = await asyncio.gather(*map(pair.generate, requests))
        for prompt, (num_top, k, length), answer in zip(prompts, asked, answers, strict=True):
            case = f"{rule}, {num_top} top, K = {k}, {length} tokens"
            assert len(answer.token_ids) == len(answer.origins) == length, case
            assert answer.record is not None
            num_drafted += answer.record.num_draft_tokens
            assert (answer.record.num_draft_tokens == 0) or k > 0, case
            if num_top is None:
                assert answer.logprobs == [], case
            else:
                tokens = [*prompt, *answer.token_ids]
                check(answer.logprobs, tokens, len(prompt), num_top, case)
        await pair.until_idle()
    assert num_drafted > 0


@pytest.mark.slow
async def test_prompt_logprobs_are_the_target_s_for_every_length_and_rule() -> None:
    """One token, one block, several; the output is what it is without them."""
    async with running_pair() as pair:
        for length in (1, 2, 64, 65, 66, 150):
            prompt = LONG_PROMPT[:length]
            for rule, num_top in (("greedy", 0), ("coupled", 4), ("standard", 20)):
                request = make_request(prompt, rule=rule, max_tokens=6)
                plain = await pair.generate(request)
                request.num_prompt_logprobs_plus_one = num_top + 1
                told, answer = await prompt_logprobs_of(pair.stub.Generate, request)
                check(told, prompt, 1, num_top, f"{length} tokens, {rule}")
                if rule != "standard":
                    assert answer.token_ids == plain.token_ids
                assert answer.record is not None
                assert answer.record.cached_prompt_tokens == 0
        await pair.until_idle()


async def test_a_prompt_can_be_scored_alone_and_from_any_place_on() -> None:
    """No token is decoded for max_tokens 0; a carried-over request wants only what is missing."""
    async with running_pair() as pair:
        for received in (0, 1, 64, 100, 149):
            request = make_request(LONG_PROMPT, max_tokens=1)
            request.max_tokens = 0
            request.num_prompt_logprobs_plus_one = 3
            request.num_prompt_logprobs_received = received
            told, answer = await prompt_logprobs_of(pair.stub.Generate, request)
            check(told, LONG_PROMPT, received + 1, 2, f"{received} received")
            assert answer.token_ids == []
            assert answer.finish_reason == generation_pb2.FINISH_REASON_LENGTH
        await pair.until_idle()


@pytest.mark.slow
async def test_a_target_that_is_lost_while_a_prompt_is_scored_costs_a_pause() -> None:
    """The session is opened anew from what is known, and nothing is told twice."""
    slow = f"{TARGET},step_ms=20"
    async with running_default_pair(slow, DRAFT) as pair:
        request = make_request(LONG_PROMPT, max_tokens=4)
        request.num_prompt_logprobs_plus_one = 2
        call = pair.blocks(request)
        first = await call.read()
        told = [*first.prompt_logprobs]
        assert 0 < len(told) < len(LONG_PROMPT) - 1
        await pair.target.stop()
        pair.owned.append(await make_target(slow, port=port_of(pair.target.address)))
        while (response := await call.read()) and response.ByteSize():
            told += response.prompt_logprobs
            if response.finish_reason:
                break
        check(told, LONG_PROMPT, 1, 1, "reopened")
        await pair.finish(call, Generated())


@pytest.mark.slow
async def test_both_fields_say_the_same_over_http() -> None:
    """`echo` with `logprobs`, and `prompt_logprobs`: one prompt, one truth; the text too."""
    prompts = [LONG_PROMPT[:9], LONG_PROMPT[20:100], [5]]
    async with running_pair() as pair, served(pair) as client:
        answer = await client.post(
            COMPLETIONS,
            json={
                "prompt": prompts,
                "n": 2,
                "temperature": 0,
                "max_tokens": 7,
                "echo": True,
                "logprobs": 2,
                "prompt_logprobs": 2,
                "return_token_ids": True,
                "ignore_eos": True,
            },
        )
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            prompt = prompts[choice["index"] // 2]
            tokens = [*prompt, *choice["token_ids"]]
            told = choice["logprobs"]["token_logprobs"]
            rows = true_logprobs(tokens, 1)
            assert told[0] is None
            assert len(told) == len(tokens) == len(choice["logprobs"]["tokens"])
            for value, row, token in zip(told[1:], rows, tokens[1:], strict=True):
                assert abs(value - row[token]) < TOLERANCE
            assert choice["prompt_logprobs"][0] is None
            for entry, token, value in zip(
                choice["prompt_logprobs"][1:], prompt[1:], told[1:], strict=False
            ):
                assert entry[str(token)]["logprob"] == value
            offsets, text = choice["logprobs"]["text_offset"], choice["text"]
            pieces = zip(
                choice["logprobs"]["tokens"], offsets, [*offsets[1:], len(text)], strict=True
            )
            assert all(text[start:end] in (piece, "") for piece, start, end in pieces)
        await pair.until_idle()
