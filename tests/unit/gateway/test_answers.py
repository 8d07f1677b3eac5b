"""Whole answers and streams say the same, in shapes that strict clients take."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from specserve.gateway import formats
from specserve.gateway.blocks import Block
from specserve.gateway.formats import AnswerFormat
from specserve.rpc.codec import pack_method
from specserve.rpc.v1.generation_pb2 import (
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_RECOVERED,
    GenerateRequest,
    SpeculationRecord,
)
from unit.gateway.fakes import (
    EOS,
    LENGTH,
    STOP,
    FakeBackend,
    Step,
    block,
    events_of,
    hello,
    logprob,
    make_client,
    prompt_of,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": MESSAGES},
}
CHUNKS: dict[str, type[BaseModel]] = {COMPLETIONS: Completion, CHAT: ChatCompletionChunk}
PATHS = [COMPLETIONS, CHAT]


def strictly(kind: type[BaseModel], value: Any) -> None:
    """Check a value against OpenAI's own schema: every key there, none null that must not be."""
    kind.model_validate(value, strict=True)


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice of either endpoint, whole or chunk."""
    if "message" in choice:
        return str(choice["message"]["content"])
    if "delta" in choice:
        return str(choice["delta"].get("content", ""))
    return str(choice["text"])


async def stream(
    backend: FakeBackend, path: str, **fields: Any
) -> tuple[list[dict[str, Any]], str]:
    """Return a stream's chunks and its last event."""
    async with make_client(backend) as client:
        answer = await client.post(path, json={**BODIES[path], "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events_of(answer.text)
    return chunks, last


async def whole(backend: FakeBackend, path: str, **fields: Any) -> dict[str, Any]:
    """Return a whole answer."""
    async with make_client(backend) as client:
        answer = await client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("include_usage", [False, True])
async def test_every_chunk_is_valid_by_the_clients_schema(path: str, include_usage: bool) -> None:
    """B070, B071: choices are always there; finish_reason is null until a choice's last chunk."""
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks, last = await stream(FakeBackend(), path, n=2, **options)

    assert last == "[DONE]"
    for chunk in chunks:
        for choice in chunk["choices"]:
            # OpenAI's own class for completions has no null here, though its servers send it.
            assert "finish_reason" in choice
        if path == CHAT:
            strictly(ChatCompletionChunk, chunk)
        else:
            finished = [
                {**c, "finish_reason": c["finish_reason"] or "stop"} for c in chunk["choices"]
            ]
            strictly(Completion, {**chunk, "choices": finished})
    for index in range(2):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == "stop"
        assert "".join(map(text_of, own)) == "Hello"
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    if include_usage:
        assert with_usage == [chunks[-1]]
        assert chunks[-1]["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer_is_valid_by_the_clients_schema(path: str) -> None:
    """Ids, texts, reasons and usage are in their places."""
    answer = await whole(FakeBackend(), path, n=3)

    strictly(Completion if path == COMPLETIONS else ChatCompletion, answer)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [text_of(choice) for choice in answer["choices"]] == ["Hello"] * 3
    assert answer["usage"]["completion_tokens"] == 15
    assert "metrics" not in answer
    assert "token_ids" not in answer["choices"][0]


async def test_a_chat_stream_tells_the_role_once_per_choice() -> None:
    """The first chunk of each choice has the role; a last one without text has an empty delta."""
    chunks, _ = await stream(FakeBackend(lambda _: [block(b"a"), block(b"", STOP)]), CHAT, n=2)
    own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == 1]

    assert [c["delta"] for c in own] == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]


EMOJI = "a😀é\u2009z".encode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
async def test_no_character_is_ever_cut(path: str, size: int) -> None:
    """B067, B068: blocks that split characters give the same text, streamed or whole."""

    def script(request: GenerateRequest) -> Sequence[Step]:
        pieces = [EMOJI[i : i + size] for i in range(0, len(EMOJI), size)]
        return [*map(block, pieces), block(b"", STOP, token_ids=[EOS])]

    chunks, _ = await stream(FakeBackend(script), path)
    answer = await whole(FakeBackend(script), path)
    streamed = [text_of(choice) for chunk in chunks for choice in chunk["choices"]]

    assert "".join(streamed) == text_of(answer["choices"][0]) == EMOJI.decode()
    assert not any("\ufffd" in text for text in streamed)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"a\xf0\x9f", b"\x98"], "a\ufffd"),
        ([b"\xf0\x9f", b" b"], "\ufffd b"),
        ([b"\xff", b"\xe2\x82"], "\ufffd\ufffd"),
    ],
)
async def test_what_is_no_character_is_replaced_once(
    path: str, pieces: list[bytes], text: str
) -> None:
    """B068: a space after an unfinished character, and an end inside one, raise nothing."""

    def script(request: GenerateRequest) -> Sequence[Step]:
        return [*map(block, pieces[:-1]), block(pieces[-1], LENGTH)]

    chunks, _ = await stream(FakeBackend(script), path)
    answer = await whole(FakeBackend(script), path)

    assert "".join(text_of(c) for chunk in chunks for c in chunk["choices"]) == text
    assert text_of(answer["choices"][0]) == text
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_choices_are_numbered_across_the_whole_body() -> None:
    """B109, B110, B113: prompt_index * n + choice, whatever finishes first."""
    last = asyncio.Event()

    def script(request: GenerateRequest) -> Sequence[Step]:
        text = prompt_of(request) + str(request.sampling.choice).encode()
        if request.sampling.choice == 0:
            return [last, block(text, STOP)]
        if request.sampling.choice == 5:
            last.set()
        return [block(text, STOP)]

    body = {"prompt": ["aaaa", "b", "cc"], "n": 2, "temperature": 0.8, "seed": 1}
    answer = await whole(FakeBackend(script), COMPLETIONS, **body)

    texts = ["aaaa0", "aaaa1", "b2", "b3", "cc4", "cc5"]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    last.clear()
    chunks, _ = await stream(FakeBackend(script), COMPLETIONS, **body)
    streamed = [c for chunk in chunks for c in chunk["choices"]]
    assert {c["index"]: c["text"] for c in streamed} == dict(enumerate(texts))
    assert streamed[-1]["index"] == 0


async def test_all_prompts_of_a_body_run_at_once() -> None:
    """B112: none waits for another; here each waits until all have begun."""
    begun = asyncio.Event()
    backend = FakeBackend()

    def script(request: GenerateRequest) -> Sequence[Step]:
        if len(backend.open) == 8:
            begun.set()
        return [begun, *hello(request)]

    backend.script = script
    async with asyncio.timeout(5):
        answer = await whole(backend, COMPLETIONS, prompt=["x"] * 8)

    assert len(answer["choices"]) == 8


@pytest.mark.parametrize("path", PATHS)
async def test_usage_counts_emitted_tokens_and_each_prompt_once(path: str) -> None:
    """B061, B062, B064, B260: usage is the truth, not the number of chunks."""

    def script(request: GenerateRequest) -> Sequence[Step]:
        cached = 0 if request.sampling.choice == 1 else 2
        record = SpeculationRecord(cached_prompt_tokens=cached)
        return [block(b"abcdefgh"), block(b"", STOP, token_ids=[EOS], record=record)]

    chunks, _ = await stream(FakeBackend(script), path, n=2, stream_options={"include_usage": True})
    answer = await whole(FakeBackend(script), path, n=2)
    prompt_tokens = 2 if path == COMPLETIONS else len("user:hi|")

    assert answer["usage"] == chunks[-1]["usage"]
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 18,
        "total_tokens": prompt_tokens + 18,
        # Choice 0 found what choice 1 had just computed: nothing was cached before.
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_cached_tokens_are_never_more_than_the_prompt() -> None:
    """B061: a choice that was carried over finds its own output in the cache as well."""
    record = SpeculationRecord(cached_prompt_tokens=288)
    answer = await whole(FakeBackend(lambda _: [block(b"x", STOP, record=record)]), COMPLETIONS)

    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("path", PATHS)
async def test_a_chunk_tells_how_many_tokens_it_holds(path: str) -> None:
    """B065, B073: by ids or by the usage so far, text or no text; else it is not sent at all."""

    def script(request: GenerateRequest) -> Sequence[Step]:
        return [block(b"ab"), block(b"", token_ids=[99]), block(b"cd", STOP, token_ids=[100])]

    fields = {"return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}
    chunks, _ = await stream(FakeBackend(script), path, **fields)
    silent, _ = await stream(FakeBackend(script), path)
    counted = [chunk for chunk in chunks if chunk["choices"][0].get("token_ids") is not None]

    assert [c["choices"][0]["token_ids"] for c in counted] == [[97, 98], [99], [100]]
    assert [c["usage"]["completion_tokens"] for c in counted] == [2, 3, 4]
    assert [text_of(c["choices"][0]) for c in silent if text_of(c["choices"][0])] == ["ab", "cd"]


def with_logprobs(request: GenerateRequest) -> Sequence[Step]:
    """Answer three tokens, one of them half a character."""
    top = {98: -0.5, 99: -1.0} if request.sampling.num_logprobs_plus_one > 1 else {}
    return [
        block(b"a", token_ids=[97], logprobs=[logprob(-0.25, top)]),
        block(
            "é".encode(),
            STOP,
            token_ids=[0xC3, 0xA9],
            logprobs=[logprob(-math.inf, top), logprob(-2.0, top)],
        ),
    ]


async def test_completion_logprobs_run_along_the_tokens() -> None:
    """B055, B056: one entry per emitted token, the emitted one among the likely ones."""
    answer = await whole(FakeBackend(with_logprobs), COMPLETIONS, logprobs=2)
    chunks, _ = await stream(FakeBackend(with_logprobs), COMPLETIONS, logprobs=2)
    found = answer["choices"][0]["logprobs"]

    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert found["token_logprobs"] == [-0.25, -9999.0, -2.0]
    assert found["text_offset"] == [0, 1, 1]
    assert found["top_logprobs"][0] == {"b": -0.5, "c": -1.0, "a": -0.25}
    joined: dict[str, list[Any]] = {name: [] for name in found}
    for chunk in chunks:
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == found


async def test_completion_logprobs_of_zero_are_the_emitted_tokens_alone() -> None:
    """B055, B256: 0 is not absent."""
    backend = FakeBackend(with_logprobs)
    answer = await whole(backend, COMPLETIONS, logprobs=0)
    found = answer["choices"][0]["logprobs"]

    assert backend.requests[0].sampling.num_logprobs_plus_one == 1
    assert found["token_logprobs"] == [-0.25, -9999.0, -2.0]
    assert found["top_logprobs"] == []


async def test_chat_logprobs_carry_the_tokens_bytes() -> None:
    """B055, B056: both shapes, whole and streamed."""
    backend = FakeBackend(with_logprobs)
    answer = await whole(backend, CHAT, logprobs=True, top_logprobs=2)
    chunks, _ = await stream(FakeBackend(with_logprobs), CHAT, logprobs=True, top_logprobs=2)
    plain = await whole(FakeBackend(with_logprobs), CHAT, logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]

    strictly(ChatCompletion, answer)
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9]]
    assert [entry["logprob"] for entry in content] == [-0.25, -9999.0, -2.0]
    assert content[0]["top_logprobs"][1] == {"token": "c", "logprob": -1.0, "bytes": [99]}
    parts = [c["logprobs"]["content"] for k in chunks for c in k["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part] == content
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("path", PATHS)
async def test_what_speculation_did_is_told_when_asked_for(path: str) -> None:
    """Names as other servers of this field have them; all choices of the body together."""

    def script(request: GenerateRequest) -> Sequence[Step]:
        first, last = hello(request)
        last.record.per_step_drafted.extend([3, 3])
        last.record.per_step_accepted.extend([2, 1])
        methods = [pack_method("draft_model"), pack_method("suffix"), 99]
        last.record.per_step_proposer.extend(methods[1:])
        for number, method in enumerate(methods):
            last.record.proposers.add(
                proposer=method,
                num_spec_steps=1,
                num_draft_tokens=3,
                num_accepted_draft_tokens=number,
            )
        first.origins.extend([TOKEN_ORIGIN_ACCEPTED, TOKEN_ORIGIN_ACCEPTED, TOKEN_ORIGIN_RECOVERED])
        last.origins.extend([TOKEN_ORIGIN_ACCEPTED, 99])
        return [first, last]

    answer = await whole(FakeBackend(script), path, n=2, speculation_metrics="detailed")
    summary = await whole(FakeBackend(script), path, speculation_metrics="summary")
    chunks, _ = await stream(FakeBackend(script), path, speculation_metrics="summary")
    found = answer["metrics"]["speculative_decoding"]

    assert found["num_spec_steps"] == 4
    assert found["mean_acceptance_length"] == 2.5
    assert found["draft_acceptance_rate"] == 0.5
    assert found["acceptance_histogram"] == [0, 2, 2, 0]
    assert found["per_step_drafted"] == [[3, 3], [3, 3]]
    assert found["per_step_accepted"] == [[2, 1], [2, 1]]
    assert found["per_step_proposer"] == [["suffix", "unknown"]] * 2
    names = ("draft_model", "suffix", "unknown")
    assert found["proposers"] == {
        name: {
            "num_spec_steps": 2,
            "num_draft_tokens": 6,
            "num_accepted_draft_tokens": 2 * number,
        }
        for number, name in enumerate(names)
    }
    origins = ["accepted", "accepted", "recovered", "accepted", "unknown"]
    assert answer["choices"][1]["token_origins"] == origins
    assert "per_step_drafted" not in summary["metrics"]["speculative_decoding"]
    assert "per_step_proposer" not in summary["metrics"]["speculative_decoding"]
    assert set(summary["metrics"]["speculative_decoding"]["proposers"]) == set(names)
    assert "token_origins" not in summary["choices"][0]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["metrics"] == summary["metrics"]


@pytest.mark.parametrize("path", PATHS)
async def test_token_ids_are_answered_when_asked_for(path: str) -> None:
    """All ids, those that are no text too."""

    def script(request: GenerateRequest) -> Sequence[Step]:
        return [block(b"hi"), block(b"", STOP, token_ids=[EOS])]

    answer = await whole(FakeBackend(script), path, return_token_ids=True)

    assert answer["choices"][0]["token_ids"] == [104, 105, EOS]


@pytest.mark.parametrize("path", PATHS)
async def test_blocks_are_joined_in_as_many_passes_however_many_choices_there_are(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """B253: a pass for each of 256 choices over all their blocks would hold the event loop up."""
    passes: list[int] = []
    write = AnswerFormat.answer

    class Counted(list[Block]):
        def __iter__(self) -> Iterator[Block]:
            passes.append(len(self))
            return super().__iter__()

    monkeypatch.setattr(
        AnswerFormat, "answer", lambda self, blocks: write(self, Counted([*blocks]))
    )
    for n in (1, 8):
        answer = await whole(FakeBackend(), path, n=n)
        assert [text_of(choice) for choice in answer["choices"]] == ["Hello"] * n

    assert passes == [2, 16]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "fields", [{"logprobs": 1}, {"speculation_metrics": "detailed"}, {"logprobs": 0, "n": 2}]
)
async def test_an_answer_of_many_figures_is_written_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], streams: bool
) -> None:
    """B253: log-probabilities and detailed metrics are megabytes; a small answer stays."""
    threads: list[int] = []

    def watch(name: str) -> None:
        write = getattr(AnswerFormat, name)

        def noted(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return write(*arguments)

        monkeypatch.setattr(AnswerFormat, name, noted)

    watch("answer")
    watch("on_block")
    ask = stream if streams else whole
    await ask(FakeBackend(), COMPLETIONS, **fields)
    assert {*threads} == {threading.get_ident()}
    threads.clear()
    monkeypatch.setattr(formats, "LONG_ANSWER_ENTRIES", 3)
    await ask(FakeBackend(), COMPLETIONS, **fields)

    assert threads
    assert threading.get_ident() not in threads
