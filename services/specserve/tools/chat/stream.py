"""Reads a chat stream from a specserve gateway. Knows the OpenAI wire shape; knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from specserve.errors import PeerUnavailable

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for one answer."""

    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float
    """Accepted / verified draft tokens; 0 without any."""
    mean_acceptance_length: float
    """Tokens per speculative round, recovered or bonus token included; 0 without any."""


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One token of an answer."""

    text: bytes
    """Its bytes, which need not be whole UTF-8."""
    origin: str
    """accepted, recovered, bonus, plain, or empty when it was not asked for."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One chunk of an answer."""

    text: str
    tokens: tuple[StreamedToken, ...]
    """Empty unless `origins` was asked for."""
    finish_reason: str | None
    num_completion_tokens: int | None
    """On the last chunk only."""
    speculation: Speculation | None
    """On the last chunk only."""


def stream_chat(
    client: httpx.Client,
    messages: Sequence[Mapping[str, str]],
    fields: Mapping[str, object],
    *,
    origins: bool = False,
) -> Generator[StreamEvent, None, None]:
    """Send a chat and yield its chunks as they arrive. Closing the iterator cancels the request.

    Args:
        client: with the gateway's base URL.
        fields: further request fields, such as temperature.
        origins: also ask for every token's bytes and where it came from.

    Raises:
        PeerUnavailable: the server refuses the request or cannot be reached; its words are kept.
    """
    body: dict[str, object] = {
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation_metrics": "detailed" if origins else "summary",
        **({"logprobs": True} if origins else {}),
        **fields,
    }
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    try:
        with client.stream("POST", "/v1/chat/completions", json=body, timeout=timeout) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                raise PeerUnavailable(str(client.base_url), _error_text(answer))
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    yield _event(json.loads(data), str(client.base_url))
    except httpx.HTTPError as error:
        raise PeerUnavailable(str(client.base_url), str(error) or type(error).__name__) from error


def _error_text(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}: {answer.text[:200]}"


def _event(chunk: Mapping[str, Any], url: str) -> StreamEvent:
    if "error" in chunk:
        raise PeerUnavailable(url, str(chunk["error"].get("message", chunk["error"])))
    choice = chunk["choices"][0] if chunk["choices"] else {}
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    origins = choice.get("token_origins") or [""] * len(logprobs)
    tokens = tuple(
        StreamedToken(bytes(entry["bytes"] or ()), origin)
        for entry, origin in zip(logprobs, origins, strict=False)
    )
    usage = chunk.get("usage") or {}
    record = (chunk.get("metrics") or {}).get("speculative_decoding")
    return StreamEvent(
        text=(choice.get("delta") or {}).get("content") or "",
        tokens=tokens,
        finish_reason=choice.get("finish_reason"),
        num_completion_tokens=usage.get("completion_tokens"),
        speculation=None if record is None else _speculation(record),
    )


def _speculation(record: Mapping[str, Any]) -> Speculation:
    return Speculation(
        num_draft_tokens=int(record["num_draft_tokens"]),
        num_accepted_draft_tokens=int(record["num_accepted_draft_tokens"]),
        draft_acceptance_rate=float(record["draft_acceptance_rate"] or 0.0),
        mean_acceptance_length=float(record["mean_acceptance_length"] or 0.0),
    )
