"""Streams and counts of a running pair: whatever a block holds, they say what was emitted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx
import pytest

from helpers.pair import running_pair as running_default_pair
from integration.test_sampling_options import CHAT, COMPLETIONS, served
from specserve.model.toy import ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer
from unit.gateway.fakes import events_of

# Every byte is a token: characters of several bytes fall anywhere in a block.
TARGET = "toy:vocab_size=257,seed=7,order=8"
DRAFT = f"{TARGET},noise=0.7,noise_seed=1"
TOKENIZER = ToyTokenizer(ToySpec.parse(TARGET))
running_pair = partial(running_default_pair, TARGET, k=8)
CHARACTERS = "aé€😀"
"""All that is ever said, by their bytes: most orders of these are no characters."""
ONLY = sorted({*TOKENIZER.encode(CHARACTERS, False)})
PROMPTS = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": [{"role": "user", "content": "x"}]}}


async def whole(client: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    """Return a whole answer."""
    answer = await client.post(path, json={**PROMPTS[path], "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


async def chunks_of(client: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    body = {**PROMPTS[path], "temperature": 0, "stream": True, **fields}
    answer = await client.post(path, content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    *chunks, last = events_of(answer.text)
    assert last == "[DONE]"
    return chunks


def text_of(choices: Sequence[dict[str, Any]]) -> str:
    """Join the text of choices of either endpoint."""
    return "".join(
        choice.get("text") or choice.get("delta", choice.get("message", {})).get("content") or ""
        for choice in choices
    )


@pytest.mark.slow
async def test_blocks_that_cross_max_tokens_count_up_to_it_B062() -> None:
    """B061, B062: twelve alike at once; no figure of usage or speculation is above the tokens."""
    async with running_pair(DRAFT) as pair, served(pair, TOKENIZER) as client:
        answers = await asyncio.gather(
            *(
                whole(
                    client,
                    COMPLETIONS,
                    max_tokens=64,
                    ignore_eos=True,
                    return_token_ids=True,
                    speculation_metrics="detailed",
                )
                for _ in range(12)
            )
        )
        for answer in answers:
            figures = answer["metrics"]["speculative_decoding"]
            made = [
                figures[f"num_{kind}_tokens"]
                for kind in ("accepted_draft", "recovered", "bonus", "plain")
            ]
            assert answer["usage"]["completion_tokens"] == sum(made) == 64
            assert len(answer["choices"][0]["token_ids"]) == 64
            assert len(answer["choices"][0]["token_origins"]) == 64
            assert sum(map(sum, figures["per_step_accepted"])) == made[0]
            assert answer["choices"][0]["token_ids"] == answers[0]["choices"][0]["token_ids"]
        assert any(a["metrics"]["speculative_decoding"]["num_draft_tokens"] for a in answers)
        await pair.until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_eos_within_a_block_ends_every_count_there_B061(path: str) -> None:
    """EOS counts as the last token, and nothing behind it counts at all."""
    ends = {"logit_bias": {"0": 5.5}, "max_tokens": 60, "return_token_ids": True}
    async with running_pair(TARGET) as pair, served(pair, TOKENIZER) as client:
        for seed in range(8):
            body = {**ends, "seed": seed, "temperature": 1.0, "speculation_metrics": "summary"}
            answer = await whole(client, path, **body)
            ids = answer["choices"][0]["token_ids"]
            figures = answer["metrics"]["speculative_decoding"]
            assert answer["usage"]["completion_tokens"] == len(ids)
            assert (answer["choices"][0]["finish_reason"] == "stop") == (ids[-1] == 0)
            assert 0 not in ids[:-1]
            made = ("accepted_draft", "recovered", "bonus", "plain")
            assert sum(figures[f"num_{kind}_tokens"] for kind in made) == len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("k", [0, 8])
async def test_each_chunk_tells_how_many_tokens_it_holds_B065(path: str, k: int) -> None:
    """B064, B065, B070, B073: usage so far, ids and chunks agree, whatever the blocks were."""
    fields = {"max_tokens": 50, "ignore_eos": True, "num_speculative_tokens": k}
    shown = {
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with running_pair(TARGET) as pair, served(pair, TOKENIZER) as client:
        plain = await whole(client, path, **{**fields, "num_speculative_tokens": 0})
        *chunks, last = await chunks_of(client, path, **fields, **shown)
    so_far = 0
    for chunk in chunks:
        (choice,) = chunk["choices"]
        so_far += len(choice.get("token_ids") or ())
        assert chunk["usage"]["completion_tokens"] == so_far
    assert so_far == last["usage"]["completion_tokens"] == 50
    assert last["choices"] == []
    assert len(chunks) < 50 or k == 0
    joined = text_of([choice for chunk in chunks for choice in chunk["choices"]])
    assert joined == text_of(plain["choices"])


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_cuts_characters_and_stops_as_the_whole_answer_does_B067(path: str) -> None:
    """B067, B068: every end in and between characters of several bytes, with and without stops."""
    async with running_pair(DRAFT) as pair, served(pair, TOKENIZER) as client:
        for max_tokens in range(1, 25):
            fields = {
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "allowed_token_ids": ONLY,
                "frequency_penalty": 0.7,
                "stop": ["aa", "é€"] if max_tokens % 2 else [],
            }
            answer = await whole(client, path, **fields)
            chunks = await chunks_of(client, path, **fields)
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert text_of(choices) == text_of(answer["choices"])
            assert choices[-1]["finish_reason"] == answer["choices"][0]["finish_reason"]
            assert not text_of(choices).encode().endswith(b"\xef\xbf")
