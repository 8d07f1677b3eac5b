"""Prompts in answers: echoed as text, and scored token by token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from specserve.gateway import wanted_logprobs
from specserve.gateway.completion_format import CompletionFormat
from specserve.gateway.token_text import TokenTexts
from specserve.rpc.v1.generation_pb2 import GenerateRequest, GenerateResponse
from unit.gateway.fakes import (
    LENGTH,
    STOP,
    FakeBackend,
    Step,
    block,
    events_of,
    logprob,
    make_client,
    prompt_of,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def scored(request: GenerateRequest) -> Sequence[Step]:
    """Score the prompt in two parts where that is asked for, then say "ab"."""
    prompt = prompt_of(request)
    logprobs = [
        logprob(-float(place), {token: -float(place), 120: -0.5})
        for place, token in enumerate(prompt[1:], 1)
    ]
    parts: list[Step] = []
    if request.num_prompt_logprobs_plus_one:
        parts = [GenerateResponse(prompt_logprobs=part) for part in (logprobs[:1], logprobs[1:])]
    if not request.max_tokens:
        return [*parts, block(b"", LENGTH)]
    num_logprobs = request.sampling.num_logprobs_plus_one - 1
    own = [logprob(-0.25, {97: -0.25} if num_logprobs else {})] if num_logprobs >= 0 else []
    return [*parts, block(b"a", logprobs=own), block(b"b", STOP, logprobs=own)]


async def ask(backend: FakeBackend, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    """Return a whole answer."""
    async with make_client(backend) as client:
        answer = await client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def stream(backend: FakeBackend, path: str = COMPLETIONS, **fields: Any) -> list[Any]:
    """Return the chunks of a stream."""
    async with make_client(backend) as client:
        answer = await client.post(path, json={**fields, "stream": True})
    assert answer.status_code == 200, answer.text
    *chunks, last = events_of(answer.text)
    assert last == "[DONE]"
    return chunks


def joined(chunks: Sequence[dict[str, Any]], index: int) -> dict[str, Any]:
    """Join one choice's chunks as a client does."""
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    whole = {**parts[0], "finish_reason": parts[-1]["finish_reason"]}
    whole["text"] = "".join(part["text"] for part in parts)
    if whole["logprobs"] is not None:
        whole["logprobs"] = {
            name: [item for part in parts for item in part["logprobs"][name]]
            for name in whole["logprobs"]
        }
    return whole


async def test_an_echo_is_the_prompt_and_what_follows() -> None:
    """Text as it was sent, ids as they read; nothing is scored for it."""
    backend = FakeBackend(scored)
    for prompt, text in (("hé", "hé"), ([104, 105], "hi"), (["x"], "x")):
        answer = await ask(backend, prompt=prompt, echo=True)
        assert answer["choices"][0]["text"] == text + "ab"
        assert answer["usage"]["completion_tokens"] == 2
    assert [r.num_prompt_logprobs_plus_one for r in backend.requests] == [0, 0, 0]


async def test_echoed_logprobs_begin_with_the_prompt_s_B109() -> None:
    """Lists of one length along prompt and output; null where nothing comes before."""
    answer = await ask(FakeBackend(scored), prompt=["hey", "x"], echo=True, logprobs=1)
    first, second = (choice["logprobs"] for choice in answer["choices"])

    assert first["tokens"] == ["h", "e", "y", "a", "b"]
    assert first["token_logprobs"] == [None, -1.0, -2.0, -0.25, -0.25]
    assert first["text_offset"] == [0, 1, 2, 3, 4]
    assert first["top_logprobs"] == [
        None,
        {"e": -1.0},
        {"y": -2.0},
        {"a": -0.25},
        {"b": -0.25, "a": -0.25},
    ]
    assert second["token_logprobs"] == [None, -0.25, -0.25]
    assert second["tokens"] == ["x", "a", "b"]


async def test_echoed_logprobs_of_zero_have_no_alternatives() -> None:
    """As of emitted tokens."""
    answer = await ask(FakeBackend(scored), prompt="hey", echo=True, logprobs=0)
    found = answer["choices"][0]["logprobs"]

    assert found["token_logprobs"] == [None, -1.0, -2.0, -0.25, -0.25]
    assert found["top_logprobs"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"echo": True, "logprobs": 2},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 0, "prompt_logprobs": 2},
        {"echo": True, "logprobs": 1, "n": 2, "prompt": [[104, 101], [0], [9, 9, 9]]},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
    ],
)
async def test_a_stream_s_prompt_is_that_of_the_whole_answer(fields: dict[str, Any]) -> None:
    """The prompt is the first chunk of each of its choices, once."""
    body = {"prompt": "hey", "return_token_ids": True, **fields}
    answer = await ask(FakeBackend(scored), **body)
    chunks = await stream(FakeBackend(scored), **body)

    for choice in answer["choices"]:
        streamed = joined(chunks, choice["index"])
        assert {**streamed, "token_ids": choice["token_ids"]} == choice


async def test_B106_an_echo_of_no_tokens_is_the_prompt() -> None:
    """max_tokens 0: nothing is decoded, and the prompt can be scored all the same."""
    backend = FakeBackend(scored)
    answer = await ask(backend, prompt="Hello", echo=True, max_tokens=0, logprobs=0)
    choice = answer["choices"][0]

    assert choice["text"] == "Hello"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0]
    assert answer["usage"]["completion_tokens"] == 0
    assert backend.requests[0].max_tokens == 0


async def test_B106_no_tokens_without_an_echo_are_refused_by_name() -> None:
    """There would be nothing to answer."""
    backend = FakeBackend(scored)
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 0})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    assert backend.requests == []


async def test_prompt_logprobs_tell_each_token_and_the_likely_ones() -> None:
    """{id: figures} per token; the rank of a token that is not told is null."""
    answer = await ask(FakeBackend(scored), prompt="hey", prompt_logprobs=1)
    told = answer["choices"][0]["prompt_logprobs"]

    assert told == [
        None,
        {"101": {"logprob": -1.0, "rank": 1, "decoded_token": "e"}},
        {"121": {"logprob": -2.0, "rank": 1, "decoded_token": "y"}},
    ]
    answer = await ask(FakeBackend(scored), prompt="hey", prompt_logprobs=2)
    assert answer["choices"][0]["prompt_logprobs"][1]["120"] == {
        "logprob": -0.5,
        "rank": 2,
        "decoded_token": "x",
    }


async def test_chats_tell_them_beside_the_choices() -> None:
    """Once per answer, and on the first chunk of a stream."""
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "n": 2}
    answer = await ask(FakeBackend(scored), CHAT, **body)
    chunks = await stream(FakeBackend(scored), CHAT, **body)

    assert len(answer["prompt_logprobs"]) == len("user:hi|")
    assert chunks[0]["prompt_logprobs"] == answer["prompt_logprobs"]
    assert not any("prompt_logprobs" in chunk for chunk in chunks[1:])


async def test_a_prompt_is_scored_once_for_all_its_choices() -> None:
    """The other choices wait with their text; they are decoded beside it."""
    scores = asyncio.Event()

    def script(request: GenerateRequest) -> Sequence[Step]:
        steps = list(scored(request))
        return [scores, *steps] if request.num_prompt_logprobs_plus_one else steps

    backend = FakeBackend(script)
    asking = asyncio.create_task(stream(backend, prompt="hey", echo=True, logprobs=1, n=3))
    # The second and the third have ended before the first has begun.
    await backend.until(lambda: len(backend.finished) == 2)
    scores.set()
    chunks = await asking

    assert [r.num_prompt_logprobs_plus_one for r in backend.requests] == [2, 0, 0]
    for index in range(3):
        assert joined(chunks, index)["text"] == "heyab"
        assert joined(chunks, index)["logprobs"]["token_logprobs"][1] == -1.0


async def test_an_echoed_character_that_the_output_completes_is_whole() -> None:
    """Ids may end within a character; its other bytes are the output's first."""
    backend = FakeBackend(lambda _: [block(b"\xa9!", STOP)])
    answer = await ask(backend, prompt=[104, 0xC3], echo=True)
    chunks = await stream(FakeBackend(backend.script), prompt=[104, 0xC3], echo=True)

    assert answer["choices"][0]["text"] == joined(chunks, 0)["text"] == "hé!"


async def test_an_orchestrator_that_tells_no_prompt_logprobs_is_a_503() -> None:
    """One of an older build does not know the field: never an answer without them."""
    async with make_client(FakeBackend()) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "hey", "prompt_logprobs": 0})

    assert answer.status_code == 503
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("streams", [False, True])
async def test_a_long_prompt_s_figures_are_written_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """B254: they are megabytes of text; no other request waits for them."""
    threads: list[int] = []
    write = TokenTexts.prompt_logprobs

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return write(*arguments)

    monkeypatch.setattr(TokenTexts, "prompt_logprobs", noted)
    ask_for = stream if streams else ask
    await ask_for(FakeBackend(scored), prompt="hey", prompt_logprobs=2)

    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("streams", [False, True])
async def test_a_prompt_s_figures_are_made_once_for_all_its_choices(
    monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Two prompts of three choices each: two of each kind, and every choice tells them."""
    made: list[str] = []

    def watch(name: str) -> None:
        write = getattr(TokenTexts, name)

        def noted(*arguments: Any) -> Any:
            made.append(name)
            return write(*arguments)

        monkeypatch.setattr(TokenTexts, name, noted)

    watch("prompt_logprobs")
    watch("echoed_logprobs")
    ask_for = stream if streams else ask
    body = {"prompt": ["hey", "ho"], "n": 3, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    answer: Any = await ask_for(FakeBackend(scored), **body)

    assert sorted(made) == ["echoed_logprobs"] * 2 + ["prompt_logprobs"] * 2
    choices = [joined(answer, i) for i in range(6)] if streams else answer["choices"]
    for index, choice in enumerate(choices):
        length = len(body["prompt"][index // 3])
        assert len(choice["prompt_logprobs"]) == length
        assert choice["logprobs"]["text_offset"] == list(range(length + 2))


async def test_choices_of_a_prompt_share_what_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The very same values, not one copy for each of up to 128 choices."""
    answers: list[Any] = []
    put_together = CompletionFormat.whole

    def noted(*arguments: Any) -> Any:
        answers.append(put_together(*arguments))
        return answers[-1]

    monkeypatch.setattr(CompletionFormat, "whole", noted)
    body = {"prompt": "hey", "n": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    await ask(FakeBackend(scored), **body)

    first, second = answers[0].choices
    assert first.prompt_logprobs is second.prompt_logprobs
    for place in (1, 2):
        assert first.logprobs.top_logprobs[place] is second.logprobs.top_logprobs[place]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt_logprobs": 3, "n": 2}, None),
        (COMPLETIONS, {"prompt_logprobs": 4, "n": 2}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 3, "n": 2, "prompt": ["hey", "x"]}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 3, "n": 2}, None),
        (COMPLETIONS, {"echo": True, "logprobs": 4, "n": 2}, "logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 3, "prompt_logprobs": 4}, "prompt_logprobs"),
        (COMPLETIONS, {"logprobs": 20, "n": 2}, None),
        (CHAT, {"prompt_logprobs": 2, "n": 5}, None),
        (CHAT, {"prompt_logprobs": 3}, "prompt_logprobs"),
    ],
)
async def test_more_figures_of_prompts_than_an_answer_may_hold_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str | None
) -> None:
    """Tokens times entries times the choices that tell them; of a chat that is one."""
    monkeypatch.setattr(wanted_logprobs, "MAX_PROMPT_ENTRIES", 24)
    start = {"prompt": "hey"} if path == COMPLETIONS else {"messages": MESSAGES}
    backend = FakeBackend(scored)
    async with make_client(backend) as client:
        answer = await client.post(path, json={**start, **fields})

    assert answer.status_code == (200 if param is None else 400)
    if param is not None:
        assert answer.json()["error"]["param"] == param
        assert "at most 24" in answer.json()["error"]["message"]
        assert backend.requests == []
