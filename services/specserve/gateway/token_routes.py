"""`/tokenize` and `/detokenize`: what a text or a chat is in token ids, and back.

As vLLM's server has them, whose field names they carry. Knows the tokenizer and bodies; asks no
orchestrator but for the pair's name and limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Request
from pydantic import FailFast, Field
from starlette.responses import Response

from specserve.errors import InvalidRequest
from specserve.gateway.answers import Answer
from specserve.gateway.config import GatewayConfig
from specserve.gateway.fields import Body
from specserve.gateway.limits import Limiter
from specserve.gateway.off_loop import LONG_BODY_BYTES, in_thread_if
from specserve.gateway.openapi import errors, request_body
from specserve.gateway.pair import PairWatch
from specserve.gateway.plan import check_model
from specserve.gateway.prompts import chat_prompt, text_prompt
from specserve.gateway.receiving import read_body
from specserve.gateway.requests import ChatMessage, ChatRequest, parsed_body
from specserve.gateway.tenants import key_tenant, resolve_tenant
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

_ERRORS = errors(400, 404, 408, 413, 429, 503)


def add_token_routes(
    app: FastAPI, tokenizer: Tokenizer, pair: PairWatch, config: GatewayConfig, limiter: Limiter
) -> None:
    """Add both routes."""
    table = tokenizer.token_table()

    async def received(request: Request) -> bytes:
        """Read a body, which counts as a request of its tenant whatever is in it."""
        raw = await read_body(request, config.max_body_bytes, config.body_timeout_s)
        limiter.count_request(resolve_tenant(request.headers, config, key_tenant(request.scope)))
        return raw

    @app.post(
        "/tokenize",
        responses={200: {"model": Tokenized}, **_ERRORS},
        openapi_extra=request_body(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        """Answer the ids of a text or a chat, and how many there are."""
        raw = await received(request)
        body = await parsed_body(raw, TokenizeRequest)
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

        def written() -> bytes:
            strings = None
            if body.return_token_strs:
                strings = [table.token_bytes[i].decode(errors="replace") for i in ids]
            return _written(
                Tokenized(
                    count=len(ids),
                    max_model_len=served.max_model_len,
                    tokens=ids,
                    token_strs=strings,
                )
            )

        return _json(await in_thread_if(len(raw) > LONG_BODY_BYTES, written))

    @app.post(
        "/detokenize",
        responses={200: {"model": Detokenized}, **_ERRORS},
        openapi_extra=request_body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        """Answer the text of token ids; bytes that are no whole character read as U+FFFD."""
        raw = await received(request)
        body = await parsed_body(raw, DetokenizeRequest)
        check_model(body.model, await pair.ready())

        def written() -> bytes:
            check_ids("tokens", body.tokens, table.vocab_size)
            text = table.decode(body.tokens, skip_special=False).decode(errors="replace")
            return _written(Detokenized(prompt=text))

        return _json(await in_thread_if(len(raw) > LONG_BODY_BYTES, written))


def _written(answer: Answer) -> bytes:
    return answer.model_dump_json().encode()


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
