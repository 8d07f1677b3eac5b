"""The embedded pair in float32, broken as the toy pair is: real arithmetic, real near-ties.

The right tokens are what the targets say without speculation before anything is broken. Knows the
model's files; knows no particular fault.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import httpx

from chaos.client import Client
from chaos.cluster import Cluster, Shape, running_cluster
from chaos.faults import FAULTS
from chaos.members import Timing
from chaos.stage import named, run_stage
from chaos.tally import Tally
from chaos.workload import Request
from specserve.tools.models import resolve_pair

KINDS = (
    "target killed",
    "target connection cut",
    "draft killed",
    "target device killed",
    "target frames swapped",
    "orchestrator killed",
    "target replies lost",
    "target back with old sessions",
)
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n",
    "The three states of matter are",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n",
    "A recipe for pancakes:\n",
    "Water boils at",
)
MAX_TOKENS = (8, 24, 40)
TRUTH_TIMEOUT_S = 120
MAX_S = 600.0
"""No fault begins after that, on however slow a machine."""


@dataclass(frozen=True, slots=True)
class Right:
    """What a request must answer."""

    token_ids: list[int]
    margins: list[float]
    """By how much each is more likely than the second best, log-probability."""


async def learn(cluster: Cluster, requests: list[Request]) -> dict[Request, Right]:
    """Ask for every request without speculation, and for its two best tokens at each place."""
    async with httpx.AsyncClient(base_url=cluster.urls()[0], timeout=TRUTH_TIMEOUT_S) as http:

        async def ask(request: Request) -> Right:
            plain = replace(request, stream=False, num_speculative_tokens=0)
            answer = await http.post("/v1/completions", json={**plain.body(), "logprobs": 2})
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            tops = [sorted(top.values()) for top in choice["logprobs"]["top_logprobs"]]
            return Right(choice["token_ids"], [top[-1] - top[-2] for top in tops])

        return dict(zip(requests, await asyncio.gather(*map(ask, requests)), strict=True))


async def tokens_of(cluster: Cluster, text: str) -> tuple[int, ...]:
    """Ask the gateway for a prompt's tokens."""
    async with httpx.AsyncClient(base_url=cluster.urls()[0], timeout=TRUTH_TIMEOUT_S) as http:
        answer = await http.post("/tokenize", json={"prompt": text})
        answer.raise_for_status()
        return tuple(answer.json()["tokens"])


async def embedded(seconds: float, seed: int, share: float) -> Tally:
    """Break the embedded pair: fewer faults, for each start loads a model."""
    pair = await asyncio.to_thread(resolve_pair, None, None, None)
    if pair.speculative is None or pair.speculative.model is None:
        raise RuntimeError("the embedded pair has no draft")
    shape = Shape(
        num_targets=2,
        num_drafts=1,
        num_gateways=1,
        timing=Timing(lease_s=10.0, hang_s=8.0, call_s=30.0),
        target=pair.target,
        draft=pair.speculative.model,
        engine_flags=("--dtype=float32", "--max-model-len=512", "--num-kv-blocks=256"),
    )
    tally = Tally(
        "plain processes, embedded pair in float32",
        num_requests_wanted=max(1, round(len(PROMPTS) * share)),
        num_faults_wanted=max(1, round(len(KINDS) * min(share, 1.0))),
        kinds=KINDS if share >= 0.5 else (),
    )
    chance = random.Random(seed)
    faults = named(FAULTS, KINDS)
    async with running_cluster(shape) as cluster:
        prompts = [await tokens_of(cluster, text) for text in PROMPTS]
        requests = [Request(prompt, length) for prompt in prompts for length in MAX_TOKENS]
        right = await learn(cluster, requests)
        client = Client(
            cluster.urls,
            lambda request, choice: right[request].token_ids,
            margin=lambda request, position: right[request].margins[position],
        )
        try:
            await run_stage(
                cluster,
                client,
                iter(lambda: chance.choice(requests), None),
                iter(chance.sample(faults, tally.num_faults_wanted)),
                tally,
                seconds=MAX_S,
                per_s=1.5,
                pause_s=0.5 * seconds / len(KINDS),
                chance=chance,
            )
        finally:
            await client.close()
    return tally
