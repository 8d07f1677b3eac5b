"""The `openai` client, unchanged, talks to the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from specserve.errors import PeerUnavailable
from unit.gateway.fakes import MODEL, STOP, FakeBackend, block, logprob, make_app

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def backend() -> FakeBackend:
    """Return what the client's gateway decodes with."""
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return a client of a gateway in this process."""
    transport = httpx.ASGITransport(make_app(backend), raise_app_exceptions=False)
    async with openai.AsyncOpenAI(
        api_key="none",
        base_url="http://gateway/v1",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    ) as client:
        yield client


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    """The answer has text, reason, usage and the served model."""
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)

    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.model == MODEL


async def test_a_streamed_chat(client: openai.AsyncOpenAI) -> None:
    """Deltas add up, and the usage comes last."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)

    assert text == "Hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == len("user:hi|") + 5


async def test_the_stream_helper_reassembles_the_answer(client: openai.AsyncOpenAI) -> None:
    """The client's own accumulator checks the order of chunks."""
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()

    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"


async def test_completions(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    """Token ids in, fields of our own through extra_body, ids out."""
    answer = await client.completions.create(
        model=MODEL,
        prompt=[0, 1],
        extra_body={"return_token_ids": True, "num_speculative_tokens": 0, "top_k": 5},
    )
    stream = await client.completions.create(model=MODEL, prompt=["a", "b"], stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].model_extra == {"token_ids": list(b"Hello")}
    assert backend.requests[0].num_speculative_tokens_plus_one == 1
    assert backend.requests[0].sampling.top_k == 5
    assert texts == {0: "Hello", 1: "Hello"}


async def test_logprobs(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    """Both shapes parse."""
    backend.script = lambda _: [block(b"a", STOP, logprobs=[logprob(-0.5, {97: -0.5, 98: -2})])]
    chat = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    completion = await client.completions.create(model=MODEL, prompt="x", logprobs=2)

    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert [t.token for t in chat.choices[0].logprobs.content[0].top_logprobs] == ["a", "b"]
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.top_logprobs == [{"a": -0.5, "b": -2.0}]


async def test_models(client: openai.AsyncOpenAI) -> None:
    """The served model is listed and described."""
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "specserve"


async def test_refusals_are_the_client_s_own_errors(client: openai.AsyncOpenAI) -> None:
    """B257, B259: status, field and code arrive as attributes."""
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError) as unhonoured:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, modalities=["audio"])
    with pytest.raises(openai.BadRequestError) as overflow:
        await client.completions.create(model=MODEL, prompt="x" * 1000)
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="other", messages=MESSAGES)

    assert refused.value.param == "temperature"
    assert unhonoured.value.param == "modalities"
    assert overflow.value.code == "context_length_exceeded"
    assert unknown.value.code == "model_not_found"


async def test_failures_are_too(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    """B259: before the stream a status, in the stream an exception; never a short text."""
    lost = PeerUnavailable("target", "none answers")
    backend.script = lambda _: [lost]
    with pytest.raises(openai.InternalServerError) as early:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    backend.script = lambda _: [block(b"half"), lost]
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    received = ""

    async def read() -> None:
        nonlocal received
        async for chunk in stream:
            received += chunk.choices[0].delta.content or ""

    with pytest.raises(openai.APIError, match="cannot be reached"):
        await asyncio.wait_for(read(), 5)

    assert early.value.status_code == 503
    assert received == "half"
