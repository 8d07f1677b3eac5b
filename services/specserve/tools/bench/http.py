"""Sends prompts to a running gateway and measures the answers, over its OpenAI endpoint.

Knows the chat stream and its extra fields; knows no gRPC.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from specserve.errors import PeerUnavailable
from specserve.tools.bench.clients import RequestSettings, stage_seconds
from specserve.tools.bench.conditions import DeploymentFacts
from specserve.tools.bench.deployment import Running
from specserve.tools.bench.sample import BenchPrompt, Reading, Sample, Speculated

CONNECT_TIMEOUT_S = 10.0


class HttpServingClient:
    """Speaks to a gateway."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def decode(
        self,
        prompt: BenchPrompt,
        settings: RequestSettings,
        request_id: str,
        num_speculative_tokens: int | None,
    ) -> Sample:
        """Decode one prompt as a chat of one turn."""
        body: dict[str, object] = {
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "ignore_eos": settings.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "speculation_metrics": "detailed",
        }
        if settings.temperature > 0:
            # A named seed alone would ask for the coupled rule.
            body |= {"seed": settings.seed_of(prompt), "rejection_sample_method": "standard"}
        if num_speculative_tokens is not None:
            body["num_speculative_tokens"] = num_speculative_tokens
        answer = _Answer(prompt)
        try:
            async with self._client.stream(
                "POST", "/v1/chat/completions", json=body, headers={"x-request-id": request_id}
            ) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise PeerUnavailable(str(self._client.base_url), _told(response, text))
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data and data != "[DONE]":
                        answer.take(json.loads(data), str(self._client.base_url))
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise PeerUnavailable(str(self._client.base_url), reason) from error
        return answer.sample()

    async def read(self) -> Reading | None:
        """Nothing: a gateway's gauges are for Prometheus, not for a client under load."""
        return None


class _Answer:
    """One stream, taken chunk by chunk."""

    def __init__(self, prompt: BenchPrompt) -> None:
        self._prompt = prompt
        self._began = time.perf_counter()
        self._at: list[float] = []
        self._sizes: list[int] = []
        self._origins: list[str] = []
        self._usage: dict[str, Any] = {}
        self._metrics: dict[str, Any] | None = None

    def take(self, chunk: dict[str, Any], url: str) -> None:
        """Take one chunk.

        Raises:
            PeerUnavailable: the stream ends with an error.
        """
        if "error" in chunk:
            raise PeerUnavailable(url, str(chunk["error"].get("message", chunk["error"])))
        for choice in chunk["choices"]:
            if size := len(choice.get("token_ids") or ()):
                self._at.append(time.perf_counter() - self._began)
                self._sizes.append(size)
                self._origins += choice.get("token_origins") or ()
        self._usage = chunk.get("usage") or self._usage
        self._metrics = (chunk.get("metrics") or {}).get("speculative_decoding") or self._metrics

    def sample(self) -> Sample:
        """Return what came."""
        return Sample(
            self._prompt.prompt_id,
            self._prompt.category,
            int(self._usage.get("prompt_tokens", 0)),
            block_at_s=tuple(self._at),
            block_sizes=tuple(self._sizes),
            e2e_s=time.perf_counter() - self._began,
            origins=tuple(self._origins),
            speculated=self._speculated(),
        )

    def _speculated(self) -> Speculated | None:
        metrics = self._metrics
        if metrics is None:
            return None
        drafted = metrics.get("per_step_drafted") or [[]]
        accepted = metrics.get("per_step_accepted") or [[]]
        details = self._usage.get("prompt_tokens_details") or {}
        return Speculated(
            per_step_drafted=tuple(drafted[0]),
            per_step_accepted=tuple(accepted[0]),
            num_plain_steps=int(metrics["num_plain_steps"]),
            num_recovered_tokens=int(metrics["num_recovered_tokens"]),
            num_bonus_tokens=int(metrics["num_bonus_tokens"]),
            num_plain_tokens=int(metrics["num_plain_tokens"]),
            num_late_proposals=int(metrics["num_late_proposals"]),
            num_cached_prompt_tokens=int(details.get("cached_tokens", 0)),
            stage_s=stage_seconds(metrics),
        )


def http_client(url: str, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """Open a client that never keeps a request waiting for a connection."""
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
    )


@asynccontextmanager
async def reached_by_url(
    name: str, url: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Running]:
    """Reach a gateway that runs already.

    Args:
        headers: what every request carries.

    Raises:
        PeerUnavailable: it does not answer, or its pair is not ready.
    """
    async with http_client(url, headers) as client:
        try:
            answer = await client.get("/ready", timeout=CONNECT_TIMEOUT_S)
            state = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise PeerUnavailable(url, str(error) or type(error).__name__) from error
        if not isinstance(state, dict) or not state.get("ready"):
            reason = state.get("reason") if isinstance(state, dict) else None
            raise PeerUnavailable(url, str(reason or "it is not ready"))
        told = {key: state.get(key) for key in ("target", "draft", "num_speculative_tokens")}
        facts = DeploymentFacts(
            name=name,
            address=url,
            speculative_config=json.dumps(told) if state.get("speculation_enabled") else "",
            engine_flags=(),
            models=(),
            versions={},
        )
        yield Running(HttpServingClient(client), facts)


def _told(response: httpx.Response, text: str) -> str:
    try:
        return f"HTTP {response.status_code}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {text[:200]}"
