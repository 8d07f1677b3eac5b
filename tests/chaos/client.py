"""One client: sends a request, reads its answer token by token, and judges it.

A gateway that is lost takes the connection with it; then, and only then, the client asks again.
Knows HTTP and the right tokens; knows no fault.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from chaos.workload import Request, Truth

DEADLINE_S = 120.0
"""A request without its end by then is lost."""

NEAR_TIE = 1e-4
"""Log-probabilities closer than this may change places in float32."""

RETRY_S = 0.2
"""Pause before a dropped connection is made anew."""

DROPPED = (httpx.TransportError,)


@dataclass(slots=True)
class Outcome:
    """What became of one request."""

    verdict: str = ""
    """right, left (by the client), failed, mismatched or lost."""
    detail: str = ""
    num_near_ties: int = 0
    """Choices that went another way where the target's two best tokens were as good as equal."""
    num_retries: int = 0
    """Times that its connection was dropped by a gateway that went away."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """(when it began, seconds) of the longest waits for a token, by the event loop's clock."""


class AnsweredError(Exception):
    """The service answered with an error."""


class WrongError(Exception):
    """What a stream said before it was dropped is wrong."""


class _LeftError(Exception):
    """The client has had enough."""


class Client:
    """Sends requests to whichever gateway is next."""

    def __init__(
        self,
        gateways: Callable[[], Sequence[str]],
        truth: Callable[[Request, int], Sequence[int]],
        *,
        margin: Callable[[Request, int], float] = lambda request, position: math.inf,
        may_retry_answers: bool = False,
    ) -> None:
        """Prepare.

        Args:
            gateways: base URLs at present; each request starts with another one.
            truth: the right tokens of a choice.
            margin: by how much (log-probability) the right token at a position is the best one.
            may_retry_answers: whether a 5xx without a token is the front's own, as Serve's proxy
                makes where the gateway behind it was killed.
        """
        self._gateways = gateways
        self._truth = truth
        self._margin = margin
        self._may_retry_answers = may_retry_answers
        self._number = 0
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=DEADLINE_S, limits=limits)

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def run(self, request: Request) -> Outcome:
        """Send a request, again where its gateway was lost, and judge the answer."""
        outcome = Outcome()
        tokens: list[list[int]] = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                tokens = await self._ask_until_answered(request, outcome)
        except TimeoutError:
            outcome.verdict = "lost"
        except AnsweredError as error:
            outcome.verdict, outcome.detail = "failed", str(error)
        except WrongError as error:
            outcome.verdict, outcome.detail = "mismatched", str(error)
        else:
            self._judge(request, tokens, outcome)
        return outcome

    async def _ask_until_answered(self, request: Request, outcome: Outcome) -> list[list[int]]:
        loop = asyncio.get_running_loop()
        waits_since = loop.time()
        while True:
            try:
                return await self._ask(request, outcome, waits_since)
            except DROPPED as error:
                if not outcome.num_retries:
                    waits_since = loop.time()
                outcome.num_retries += 1
                outcome.detail = repr(error)
            await asyncio.sleep(RETRY_S)

    async def _ask(self, request: Request, outcome: Outcome, waits_since: float) -> list[list[int]]:
        urls = self._gateways()
        self._number += 1
        url = f"{urls[self._number % len(urls)]}/v1/completions"
        tokens: list[list[int]] = [[] for _ in range(request.n)]
        loop = asyncio.get_running_loop()
        heard_at = waits_since

        def heard() -> None:
            nonlocal heard_at
            now = loop.time()
            outcome.pauses.append((heard_at, now - heard_at))
            heard_at = now

        try:
            async with self._http.stream("POST", url, json=request.body()) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    if self._may_retry_answers and answer.status_code in (500, 502, 503):
                        raise httpx.RemoteProtocolError(f"{answer.status_code} {text[:200]}")
                    raise AnsweredError(f"{answer.status_code} {text[:300]}")
                if request.stream:
                    await self._read_stream(request, answer, tokens, heard)
                else:
                    body = json.loads(await answer.aread())
                    heard()
                    for choice in body["choices"]:
                        tokens[choice["index"]] += choice["token_ids"]
        except _LeftError:
            pass
        except DROPPED:
            if request.is_exact:
                self._check_prefix(request, tokens)
            raise
        return tokens

    @staticmethod
    async def _read_stream(
        request: Request,
        answer: httpx.Response,
        tokens: list[list[int]],
        heard: Callable[[], None],
    ) -> None:
        num_ended = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise AnsweredError(f"after {sum(map(len, tokens))} tokens: {chunk['error']}")
            for choice in chunk["choices"]:
                heard()
                tokens[choice["index"]] += choice.get("token_ids") or ()
                num_ended += choice.get("finish_reason") is not None
            if request.leave_after is not None and len(tokens[0]) >= request.leave_after:
                raise _LeftError
        if num_ended < request.n:
            raise httpx.RemoteProtocolError("the stream ended without its end")

    def _check_prefix(self, request: Request, tokens: list[list[int]]) -> None:
        """Refuse a dropped stream whose beginning was wrong."""
        for choice, given in enumerate(tokens):
            right = list(self._truth(request, choice))[: len(given)]
            if given != right and not self._is_near_tie(request, given, right):
                raise WrongError(f"choice {choice} of {request} began with {given}")

    def _is_near_tie(self, request: Request, given: list[int], right: list[int]) -> bool:
        """Say whether two texts part where a model's last bits may decide."""
        if len(given) != len(right):
            return False
        first = next(i for i, pair in enumerate(zip(given, right, strict=True)) if len({*pair}) > 1)
        return self._margin(request, first) < NEAR_TIE

    def _judge(self, request: Request, tokens: list[list[int]], outcome: Outcome) -> None:
        outcome.verdict = "left" if request.leave_after is not None else "right"
        for choice, given in enumerate(tokens):
            if request.is_exact:
                right = list(self._truth(request, choice))
                if request.leave_after is not None:
                    right = right[: len(given)]
                is_right = given == right
                if not is_right and self._is_near_tie(request, given, right):
                    outcome.num_near_ties += 1
                    is_right = True
            else:
                right = []
                is_right = len(given) == request.max_tokens
            if not is_right:
                outcome.verdict = "mismatched"
                outcome.detail = f"choice {choice} of {request}: {given}, {right} were right"


def toy_truth(target: str) -> Callable[[Request, int], Sequence[int]]:
    """Return the truth of a toy."""
    return Truth(target).tokens
