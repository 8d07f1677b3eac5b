"""`/tokenize` and `/detokenize`: what a text or a chat is in token ids, and back.

As vLLM's server has them, whose field names they carry. Knows the tokenizer and bodies; asks no
orchestrator but for the pair's name and limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Request
from pydantic import FailFast, Field

from specserve.errors import InvalidRequest
from specserve.gateway.answers import Answer
from specserve.gateway.config import GatewayConfig
from specserve.gateway.fields import Body
from specserve.gateway.openapi import errors, request_body
from specserve.gateway.pair import PairWatch
from specserve.gateway.plan import check_model
from specserve.gateway.prompts import chat_prompt, text_prompt
from specserve.gateway.receiving import read_body
from specserve.gateway.requests import ChatMessage, ChatRequest, parse_body
from specserve.speculation.constraint_checks import check_ids

if TYPE_CHECKING:  # it brings the tokenizer library along, which a fake does not need
    from specserve.model.tokenizer import Tokenizer


class TokenizeRequest(Body):
    """The body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    """Served model name; may be omitted."""
    prompt: str | None = None
    """Text, as `/v1/completions` reads it."""
    messages: Annotated[list[ChatMessage], FailFast()] = Field(default_factory=list, min_length=1)
    """A chat, as `/v1/chat/completions` reads it, up to where the assistant speaks."""
    add_special_tokens: bool = True
    """Whether a prompt gets the tokens that a text begins with; a chat's template has its own."""
    return_token_strs: bool = False
    """Answer `token_strs` too: what each token reads like by itself."""


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    """Served model name; may be omitted."""
    tokens: Annotated[list[int], FailFast()]
    """Token ids; special ones read as their names."""


class Tokenized(Answer):
    """The answer of `/tokenize`."""

    count: int
    """Tokens."""
    max_model_len: int
    """Longest sequence in tokens; 0 means no limit."""
    tokens: list[int]
    """Their ids."""
    token_strs: list[str] | None
    """What each token reads like by itself, if asked for."""


class Detokenized(Answer):
    """The answer of `/detokenize`."""

    prompt: str
    """The text."""


BODIES = (TokenizeRequest, DetokenizeRequest)


def add_token_routes(
    app: FastAPI, tokenizer: Tokenizer, pair: PairWatch, config: GatewayConfig
) -> None:
    """Add both routes."""
    table = tokenizer.token_table()

    @app.post(
        "/tokenize",
        responses=errors(400, 404, 413, 503),
        openapi_extra=request_body(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Tokenized:
        """Answer the ids of a text or a chat, and how many there are."""
        body = parse_body(
            await read_body(request, config.max_body_bytes, config.body_timeout_s), TokenizeRequest
        )
        served = await pair.ready()
        check_model(body.model, served)
        if (body.prompt is None) != bool(body.messages):
            raise InvalidRequest("prompt", "a prompt or messages, one of both, was wanted")
        thread_chars = config.tokenize_in_thread_chars
        if body.messages:
            chat = ChatRequest.model_construct(messages=body.messages)
            ids = await chat_prompt(chat, tokenizer, thread_chars)
        else:
            ids = await text_prompt(
                body.prompt or "", tokenizer, thread_chars, special=body.add_special_tokens
            )
        strings = [table.token_bytes[i].decode(errors="replace") for i in ids]
        return Tokenized(
            count=len(ids),
            max_model_len=served.max_model_len,
            tokens=ids,
            token_strs=strings if body.return_token_strs else None,
        )

    @app.post(
        "/detokenize",
        responses=errors(400, 404, 413, 503),
        openapi_extra=request_body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Detokenized:
        """Answer the text of token ids; bytes that are no whole character read as U+FFFD."""
        body = parse_body(
            await read_body(request, config.max_body_bytes, config.body_timeout_s),
            DetokenizeRequest,
        )
        check_model(body.model, await pair.ready())
        check_ids("tokens", body.tokens, table.vocab_size)
        text = table.decode(body.tokens, skip_special=False).decode(errors="replace")
        return Detokenized(prompt=text)
