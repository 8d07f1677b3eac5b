"""A running deployment through its gateway: what the gate asks of a pair, over the OpenAI endpoint.

Prompts go as token ids and token ids come back, so that nothing hangs on text. Knows completions
and their extra fields; knows no gRPC, and no more of the pair than a gateway tells.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx

from specserve.errors import PeerUnavailable
from specserve.rpc.v1.generation_pb2 import SpeculationRecord
from specserve.speculation.types import AcceptanceRule
from specserve.tools.generation_client import MAX_LOGPROBS, Generated, Job, TextClient


class GatewayClient(TextClient):
    """Speaks to a gateway."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ready(self) -> dict[str, Any]:
        """Return what `/ready` says.

        Raises:
            PeerUnavailable: it does not answer, or its pair is not ready.
        """
        state = await self._send("GET", "/ready", None)
        if not state.get("ready"):
            raise PeerUnavailable(self._url, str(state.get("reason") or "it is not ready"))
        return state

    async def token_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a one-turn chat."""
        body = {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
        return tuple((await self._send("POST", "/tokenize", body))["tokens"])

    async def generate(self, job: Job) -> Generated:
        """Decode one choice; log-probabilities are not asked for.

        Raises:
            PeerUnavailable: the request was refused or could not go on.
        """
        sampling = job.sampling
        body: dict[str, object] = {
            "prompt": list(job.prompt_token_ids),
            "max_tokens": job.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "seed": sampling.seed,
            "ignore_eos": job.ignore_eos,
            "return_token_ids": True,
            "speculation_metrics": "detailed",
        }
        if sampling.rule is not AcceptanceRule.GREEDY:
            body["rejection_sample_method"] = sampling.rule.value
        if job.num_speculative_tokens is not None:
            body["num_speculative_tokens"] = job.num_speculative_tokens
        began = time.perf_counter()
        answer = await self._send("POST", "/v1/completions", body, job.request_id)
        metrics = answer["metrics"]["speculative_decoding"]
        return Generated(
            tuple(answer["choices"][0]["token_ids"]),
            (),
            SpeculationRecord(
                num_draft_tokens=metrics["num_draft_tokens"],
                num_accepted_draft_tokens=metrics["num_accepted_draft_tokens"],
                per_step_drafted=[n for steps in metrics["per_step_drafted"] for n in steps],
            ),
            (),
            time.perf_counter() - began,
            (),
            (),
        )

    async def candidates(self, token_ids: Sequence[int], request_id: str) -> dict[int, float]:
        """Ask the target what may come after a text: what it says of one more token of a prompt."""
        body = {
            # Which token stands last is all the same: what is asked for is said before it.
            "prompt": [*token_ids, token_ids[-1]],
            "max_tokens": 1,
            "temperature": 0,
            "num_speculative_tokens": 0,
            "prompt_logprobs": MAX_LOGPROBS,
        }
        answer = await self._send("POST", "/v1/completions", body, request_id)
        told = answer["choices"][0]["prompt_logprobs"][-1]
        return {int(token_id): figures["logprob"] for token_id, figures in told.items()}

    @property
    def _url(self) -> str:
        return str(self._client.base_url)

    async def _send(
        self, method: str, path: str, body: object, request_id: str | None = None
    ) -> dict[str, Any]:
        headers = {} if request_id is None else {"x-request-id": request_id}
        try:
            answer = await self._client.request(method, path, json=body, headers=headers)
            values = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise PeerUnavailable(self._url, str(error) or type(error).__name__) from error
        if not isinstance(values, dict):
            raise PeerUnavailable(self._url, f"HTTP {answer.status_code}: no JSON object")
        if answer.status_code != httpx.codes.OK:
            refusal = values.get("error")
            said = refusal.get("message") if isinstance(refusal, dict) else values.get("reason")
            raise PeerUnavailable(self._url, f"HTTP {answer.status_code}: {said}")
        return values
