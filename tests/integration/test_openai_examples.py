"""What OpenAI's documents show of their Python client, against a running pair.

Only base URL, key and model are ours. The calls are those of the documents; what is asserted is
what a reader of the documents expects to get.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from helpers.gateway import running_gateway
from helpers.pair import running_pair
from specserve.gateway.config import GatewayConfig

TARGET = "toy:vocab_size=257,seed=7,order=8"
DRAFT = f"{TARGET},noise=0.7,noise_seed=1"
MODEL = "served-model"
CONFIG = GatewayConfig(port=0, served_model_name=MODEL)
# Room for JSON whose strings end by chance.
FIELDS: dict[str, object] = {"max_model_len": 8192, "num_kv_blocks": 1100, "block_size": 16}


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """Serve the pair behind a gateway; gives the URL."""
    async with (
        running_pair(TARGET, DRAFT, target_fields=FIELDS, draft_fields=FIELDS) as pair,
        running_gateway(pair, TARGET, CONFIG) as url,
    ):
        yield url
        await pair.until_idle()


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


class Step(BaseModel):
    explanation: str
    output: str


class MathResponse(BaseModel):
    steps: list[Step]
    final_answer: str


def a_chat(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Hello!"},
        ],
        max_completion_tokens=20,
    )
    message = completion.choices[0].message
    assert message.role == "assistant"
    assert message.content is not None
    assert message.refusal is None
    assert completion.usage is not None
    assert completion.usage.total_tokens > completion.usage.prompt_tokens
    assert completion._request_id


def a_streamed_chat(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say this is a test"}],
        stream=True,
        max_completion_tokens=20,
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas)


def a_stream_with_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say this is a test"}],
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=20,
    )
    *chunks, last = stream
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens > 0


def logprobs_of_a_chat(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello!"}],
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=8,
        temperature=0,
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for token in logprobs.content:
        first, second = token.top_logprobs
        # Greedily the likeliest is taken.
        assert token.logprob == first.logprob >= second.logprob
        assert token.token == first.token


def a_completion(client: OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL, prompt="Say this is a test", max_tokens=7, temperature=0
    )
    assert completion.object == "text_completion"
    assert completion.choices[0].finish_reason in ("stop", "length")
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 7


def a_streamed_completion(client: OpenAI) -> None:
    whole = client.completions.create(
        model=MODEL, prompt="Say this is a test", max_tokens=7, temperature=0
    )
    text = ""
    for chunk in client.completions.create(
        model=MODEL, prompt="Say this is a test", max_tokens=7, temperature=0, stream=True
    ):
        text += chunk.choices[0].text
    assert text == whole.choices[0].text


def logprobs_of_a_completion(client: OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL, prompt="Say this is a test", max_tokens=0, echo=True, logprobs=1
    )
    choice = completion.choices[0]
    assert choice.text == "Say this is a test"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.tokens == list("Say this is a test")
    assert len(choice.logprobs.token_logprobs) == len("Say this is a test")


def json_of_a_schema(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Extract the event information."},
            {"role": "user", "content": "Alice and Bob are going to a fair on Friday."},
        ],
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "event",
                "strict": True,
                "schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "date": {"type": "string"},
                        "participants": {"type": "array", "items": {"type": "string"}},
                    },
                    "required": ["name", "date", "participants"],
                    "additionalProperties": False,
                },
            },
        },
    )
    event = json.loads(completion.choices[0].message.content or "")
    assert sorted(event) == ["date", "name", "participants"]


def json_of_any_object(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Answer in JSON."}],
        response_format={"type": "json_object"},
    )
    assert isinstance(json.loads(completion.choices[0].message.content or ""), dict)


def a_parsed_answer(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Extract the event information."},
            {"role": "user", "content": "Alice and Bob are going to a fair on Friday."},
        ],
        response_format=CalendarEvent,
    )
    event = completion.choices[0].message.parsed
    assert isinstance(event, CalendarEvent)


def a_parsed_answer_with_nested_models(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[
            {"role": "system", "content": "You are a helpful math tutor."},
            {"role": "user", "content": "solve 8x + 31 = 2"},
        ],
        response_format=MathResponse,
    )
    message = completion.choices[0].message
    assert message.parsed is not None
    assert message.parsed.final_answer is not None


def a_parsed_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Alice and Bob are going to a fair."}],
        response_format=CalendarEvent,
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    parsed = stream.get_final_completion().choices[0].message.parsed
    assert parsed is not None
    assert CalendarEvent.model_validate_json(text) == parsed


def raw_answers(client: OpenAI) -> None:
    response = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say this is a test"}],
        max_completion_tokens=5,
    )
    assert response.headers.get("x-request-id")
    assert response.parse().choices[0].message.content is not None


def an_error(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="another", messages=[{"role": "user", "content": "x"}])
    assert caught.value.status_code == 404
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", temperature=3)
    assert refused.value.param == "temperature"


def the_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


EXAMPLES: list[Callable[[OpenAI], None]] = [
    a_chat,
    a_streamed_chat,
    a_stream_with_usage,
    logprobs_of_a_chat,
    a_completion,
    a_streamed_completion,
    logprobs_of_a_completion,
    json_of_a_schema,
    json_of_any_object,
    a_parsed_answer,
    a_parsed_answer_with_nested_models,
    a_parsed_stream,
    raw_answers,
    an_error,
    the_models,
]


@pytest.mark.slow
async def test_the_client_s_documented_examples_run_B256_B257_B260() -> None:
    """Completions, chats, streams, log-probabilities, JSON of a schema, errors, models."""
    async with serving() as url:
        with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            for example in EXAMPLES:
                try:
                    await asyncio.to_thread(example, client)
                except Exception as error:
                    error.add_note(example.__name__)
                    raise


@pytest.mark.slow
async def test_the_asynchronous_client_says_the_same() -> None:
    """Whole and streamed; `async for` over the chunks."""
    async with (
        serving() as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        whole = await client.completions.create(
            model=MODEL, prompt="Say this is a test", max_tokens=7, temperature=0
        )
        stream = await client.completions.create(
            model=MODEL, prompt="Say this is a test", max_tokens=7, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text
