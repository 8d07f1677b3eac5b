"""What drafting ahead is worth: tokens/s with the outcome cache off and on, on modelled devices.

A toy pair whose forwards take a modelled time: the target T a step, the draft c * T a token,
whatever the number of rows. Off and on run side by side, turn by turn, so that what else happens on
the machine falls on both. Knows the generation service and the draft's /metrics.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import Generated, GenerationClient, Job
from specserve.tools.held_port import HeldPort
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.terminal import say

TARGET_STEP_MS = 20.0
COSTS = (0.1, 0.25)
"""c: the draft's time per token over the target's per step."""

NOISES = {0.6: 0.65, 0.85: 0.2}
"""Noise of toy drafts of about this acceptance per position, for greedy requests."""

BATCHES = (1, 8)
RULES = (AcceptanceRule.GREEDY, AcceptanceRule.STANDARD, AcceptanceRule.COUPLED)
NUM_SPECULATIVE_TOKENS = 4
NUM_TOKENS = 48
NUM_TURNS = 2
TOY = "toy:vocab_size=96,seed=7"


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """What to measure."""

    num_cached_outcomes: int = 8
    costs: Sequence[float] = COSTS
    rules: Sequence[AcceptanceRule] = RULES


@dataclass(slots=True)
class _Side:
    """One of the two pairs: cache off or on."""

    client: GenerationClient
    metrics_url: str
    wall_s: float = 0.0
    num_tokens: int = 0

    async def run(self, jobs: list[Job], concurrency: int) -> list[Generated]:
        began = time.perf_counter()
        done = await self.client.generate_all(jobs, concurrency)
        self.wall_s += time.perf_counter() - began
        self.num_tokens += sum(len(generated.token_ids) for generated in done)
        return done

    async def counts(self) -> dict[str, float]:
        """Read the outcome cache's counters."""
        text = await asyncio.to_thread(_read, self.metrics_url)
        found = {}
        for line in text.splitlines():
            if line.startswith("specserve_outcome_cache_"):
                name, _, value = line.partition(" ")
                key = name.removeprefix("specserve_outcome_cache_").partition("_total")[0]
                found[key] = float(value)
        return found


async def run_overlap_suite(options: OverlapOptions) -> dict[str, float]:
    """Measure every cost, acceptance, batch and rule, off and on by turns."""
    figures: dict[str, float] = {}
    for cost in options.costs:
        for acceptance, noise in NOISES.items():
            draft = f"{TOY},noise={noise},noise_seed=1,step_ms={cost * TARGET_STEP_MS}"
            async with AsyncExitStack() as stack:
                off = await _start(stack, draft, 0)
                on = await _start(stack, draft, options.num_cached_outcomes)
                for rule in options.rules:
                    for batch in BATCHES:
                        name = f"overlap.c{cost}.a{acceptance}.{rule}.{batch}"
                        figures |= await _compare(name, off, on, rule, batch)
    return figures


async def _start(stack: AsyncExitStack, draft: str, num_cached_outcomes: int) -> _Side:
    port = stack.enter_context(HeldPort()).number
    config = json.dumps(
        {
            "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
            "num_cached_outcomes": num_cached_outcomes,
        }
    )
    spec = PairSpec(
        f"{TOY},step_ms={TARGET_STEP_MS}",
        draft,
        config,
        num_gateways=0,
        draft_flags=(f"--metrics-port={port}",),
    )
    local = await stack.enter_async_context(LocalPair(spec))
    client = await stack.enter_async_context(GenerationClient(local.orchestrators[0].address))
    await client.wait_ready()
    return _Side(client, f"http://127.0.0.1:{port}/metrics")


async def _compare(
    name: str, off: _Side, on: _Side, rule: AcceptanceRule, batch: int
) -> dict[str, float]:
    for side in (off, on):
        await side.run(_jobs(f"{name}-warm", rule, batch), batch)
        side.wall_s, side.num_tokens = 0.0, 0
    before = await on.counts()
    accepted = drafted = 0
    for turn in range(NUM_TURNS):
        for side in (off, on) if turn % 2 == 0 else (on, off):
            done = await side.run(_jobs(f"{name}-{turn}", rule, 2 * batch), batch)
            accepted += sum(g.record.num_accepted_draft_tokens for g in done)
            drafted += sum(g.record.num_draft_tokens for g in done)
    after = await on.counts()
    count = {key: after[key] - before.get(key, 0.0) for key in after}
    asked = count["hits"] + count["misses"]
    hit_rate = count["hits"] / asked if asked else 0.0
    draft_s = count["hidden_seconds"] + count["asked_seconds"]
    hidden = count["hidden_seconds"] / draft_s if draft_s else 0.0
    off_rate, on_rate = off.num_tokens / off.wall_s, on.num_tokens / on.wall_s
    say(
        f"{name}: accepted {accepted / drafted:.2f} of drafted, off {off_rate:.1f} tokens/s, "
        f"on {on_rate:.1f}, ratio {on_rate / off_rate:.3f}; "
        f"hits {hit_rate:.2f}, draft time hidden {hidden:.2f}, "
        f"{count['branch_tokens'] / max(1.0, count['hidden_tokens']):.1f} drafted ahead per hidden"
    )
    return {
        f"{name}.off_tokens_per_s": off_rate,
        f"{name}.on_tokens_per_s": on_rate,
        f"{name}.ratio": on_rate / off_rate,
        f"{name}.hit_rate": hit_rate,
        f"{name}.hidden_share": hidden,
    }


def _jobs(name: str, rule: AcceptanceRule, count: int) -> list[Job]:
    temperature = 0.0 if rule is AcceptanceRule.GREEDY else 1.0
    return [
        Job(
            f"{name}-{index}",
            (5, 6, 7, 3 + index % 32),
            SamplingParams(rule, seed=index, choice=0, temperature=temperature),
            NUM_TOKENS,
            ignore_eos=True,
        )
        for index in range(max(3, count))
    ]


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - our own port
        return str(response.read(), "utf-8")
