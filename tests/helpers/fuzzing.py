"""Sends fuzz requests to a running gateway over TCP, judges each answer, and says what it found."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema

from support.fuzz_bodies import CHAT, COMPLETIONS, FuzzRequest

NUM_AT_ONCE = 16
STUCK_S = 120.0
"""An answer that takes longer is none."""
MIN_TOKENS = 4
"""Of an answer that counts as one."""

_ANSWERS = {COMPLETIONS: "Completion", CHAT: "ChatCompletion"}
_CHUNKS = {COMPLETIONS: "Completion", CHAT: "ChatCompletionChunk"}
_OTHERS = {"/tokenize": "Tokenized", "/detokenize": "Detokenized"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request."""

    request: FuzzRequest
    status: str
    """Status code, or `left` where the client went away."""
    num_tokens: int
    latency_s: float
    problem: str
    """What is wrong with the answer; empty for a right one."""


class Judge:
    """Says what is wrong with an answer, by the published document and by sums."""

    def __init__(self, document: dict[str, Any]) -> None:
        components = document["components"]
        self._validators = {
            name: jsonschema.Draft202012Validator(
                {"$ref": f"#/components/schemas/{name}", "components": components}
            )
            for name in {*_ANSWERS.values(), *_CHUNKS.values(), *_OTHERS.values(), "ErrorAnswer"}
        }

    def whole(self, request: FuzzRequest, value: dict[str, Any]) -> str:
        """Judge a whole answer with status 200."""
        if request.path in _OTHERS:
            return self._misshapen(_OTHERS[request.path], value)
        if problem := self._misshapen(_ANSWERS[request.path], value):
            return problem
        return _wrong_sums(json.loads(request.content), value)

    def error(self, status: int, headers: httpx.Headers, value: dict[str, Any]) -> str:
        """Judge an error: one that the client can mend names the field, 503 says when to come."""
        if problem := self._misshapen("ErrorAnswer", value):
            return problem
        error = value["error"]
        if status in (429, 503):
            return "" if "retry-after" in headers else f"{status} without Retry-After"
        if status not in (400, 404, 413):
            return f"status {status}: {error['message']}"
        if error["param"] is None and not error["message"].startswith("the body is"):
            return f"no field is named: {error['message']}"
        return ""

    def events(self, request: FuzzRequest, events: Sequence[str]) -> str:
        """Judge a stream: every chunk has its shape, and it ends as it should."""
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        failed = [chunk for chunk in chunks if "error" in chunk]
        if failed:
            kind = failed[0]["error"]["type"]
            is_last = chunks[-1] is failed[0] and events[-1] != "[DONE]"
            if kind in ("invalid_request_error", "service_unavailable_error") and is_last:
                return ""
            return f"a stream ends with {failed[0]}, then {events[-1][:40]}"
        if not events or events[-1] != "[DONE]":
            return "a stream has no end"
        for chunk in chunks:
            if problem := self._misshapen(_CHUNKS[request.path], chunk):
                return problem
        ended = Counter(
            choice["index"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["finish_reason"]
        )
        return "" if set(ended.values()) == {1} else f"choices end {ended}"

    def _misshapen(self, name: str, value: object) -> str:
        fault = next(self._validators[name].iter_errors(value), None)
        return "" if fault is None else f"not a {name}: {fault.json_path}: {fault.message[:200]}"


def _wrong_sums(body: dict[str, Any], value: dict[str, Any]) -> str:
    usage, choices = value["usage"], value["choices"]
    if [choice["index"] for choice in choices] != [*range(len(choices))]:
        return "choices are out of order"
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        return "total_tokens is no sum"
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most is not None and usage["completion_tokens"] > most * len(choices):
        return f"{usage['completion_tokens']} tokens, at most {most} each were asked for"
    told = [choice["token_ids"] for choice in choices if "token_ids" in choice]
    if told and sum(map(len, told)) != usage["completion_tokens"]:
        return "token_ids are not the tokens of the usage"
    return ""


async def send(client: httpx.AsyncClient, judge: Judge, request: FuzzRequest) -> Outcome:
    """Send a request and judge what comes back."""
    began = time.monotonic()

    def outcome(status: str, num_tokens: int = 0, problem: str = "") -> Outcome:
        return Outcome(request, status, num_tokens, time.monotonic() - began, problem)

    try:
        async with (
            asyncio.timeout(STUCK_S),
            client.stream(
                "POST",
                request.path,
                content=request.content,
                headers={"content-type": "application/json"},
            ) as answer,
        ):
            status = str(answer.status_code)
            if request.leaves_early and answer.status_code == 200:
                return outcome("left")
            raw = await answer.aread()
            if answer.headers["content-type"].startswith("text/event-stream"):
                events = [
                    part.removeprefix("data: ") for part in raw.decode().split("\n\n") if part
                ]
                return outcome(status, _num_streamed(events), judge.events(request, events))
            value = json.loads(raw)
            if answer.status_code != 200:
                return outcome(
                    status, problem=judge.error(answer.status_code, answer.headers, value)
                )
            num_tokens = value.get("usage", {}).get("completion_tokens", 0)
            return outcome(status, num_tokens, judge.whole(request, value))
    except TimeoutError:
        return outcome("none", problem=f"stuck for {STUCK_S:.0f} s")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return outcome("none", problem=f"{type(error).__name__}: {error}")


def _num_streamed(events: Sequence[str]) -> int:
    """Count a stream's tokens: by its usage, its ids, or its letters, of which each is a token."""
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    usages = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    num_ids = sum(len(choice.get("token_ids") or ()) for choice in choices)
    letters = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    return max([num_ids, len(letters), *usages])


async def send_all(url: str, judge: Judge, requests: Sequence[FuzzRequest]) -> list[Outcome]:
    """Send all requests, several at once, in order."""
    outcomes: list[Outcome] = []
    waiting = iter(requests)

    async def work(client: httpx.AsyncClient) -> None:
        for request in waiting:
            outcome = await send(client, judge, request)
            outcomes.append(outcome)

    limits = httpx.Limits(max_connections=NUM_AT_ONCE)
    async with (
        httpx.AsyncClient(base_url=url, limits=limits, timeout=STUCK_S) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(NUM_AT_ONCE):
            group.create_task(work(client))
    return outcomes


def share_answered(outcomes: Sequence[Outcome]) -> float:
    """Return the share of requests answered 200 with enough tokens."""
    answered = sum(o.status == "200" and o.num_tokens >= MIN_TOKENS for o in outcomes)
    return answered / len(outcomes)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return what was sent and what came back, for people."""
    lines = [f"{'requests':<18}{'sent':>7}{'>= 4 tokens':>13}{'worst s':>9}  statuses"]
    kinds = sorted({outcome.request.kind for outcome in outcomes})
    for kind in [*kinds, "all"]:
        own = [o for o in outcomes if kind in (o.request.kind, "all")]
        statuses = Counter(outcome.status for outcome in own)
        told = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        worst = max(outcome.latency_s for outcome in own)
        lines.append(f"{kind:<18}{len(own):>7}{share_answered(own):>13.0%}{worst:>9.2f}  {told}")
    return "\n".join(lines)


def problems(outcomes: Sequence[Outcome], limit: int = 20) -> str:
    """Return the first faults, each kind once, with a request that shows it."""
    first: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.problem:
            first.setdefault(outcome.problem[:60], outcome)
    return "\n".join(
        f"{outcome.problem}\n  {outcome.request.kind}, {outcome.request.path}: "
        f"{outcome.request.content[:600]!r}"
        for outcome in [*first.values()][:limit]
    )
