"""What drafting ahead is worth: tokens/s with the outcome cache off and on, on modelled devices.

A toy pair whose forwards take a modelled time: the target T a step, the draft c * T a token,
whatever the number of rows. Off and on run side by side, pair by pair, so that what else happens on
the machine falls on both. On, the draft tries out whether it pays (`model/overlap_trial.py`): what
is measured is that choice, trials included. Knows the generation service and the draft's /metrics.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.bench.statistics import Work, rate, ratio_of_rates
from specserve.tools.generation_client import GenerationClient, Job
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
NUM_PAIRS = 8
WARM_JOBS = 14
"""Requests before anything is measured, of one session or of each two: the draft has then tried
both ways."""

JOBS_PER_SESSION = 2
LEAST_JOBS = 4
TOY = "toy:vocab_size=96,seed=7"

LEAST_HIDDEN = 0.6
"""Share of draft time to hide where drafting ahead is chosen."""


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """What to measure."""

    num_cached_outcomes: int = 8
    costs: Sequence[float] = COSTS
    rules: Sequence[AcceptanceRule] = RULES
    num_pairs: int = NUM_PAIRS


@dataclass(slots=True)
class _Side:
    """One of the two pairs: cache off or on."""

    client: GenerationClient
    metrics_url: str
    work: list[Work] = field(default_factory=list)
    num_accepted: int = 0
    num_drafted: int = 0
    num_later_rounds: int = 0
    """Rounds that follow another one of their request."""

    async def run(self, jobs: list[Job], concurrency: int) -> None:
        began = time.perf_counter()
        done = await self.client.generate_all(jobs, concurrency)
        seconds = time.perf_counter() - began
        self.work.append(Work(sum(len(each.token_ids) for each in done), seconds))
        self.num_accepted += sum(each.record.num_accepted_draft_tokens for each in done)
        self.num_drafted += sum(each.record.num_draft_tokens for each in done)
        self.num_later_rounds += sum(each.num_rounds - 1 for each in done)

    def forget(self) -> None:
        """Count from now on."""
        self.work.clear()
        self.num_accepted = self.num_drafted = self.num_later_rounds = 0

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
    """Measure every cost, acceptance, batch and rule, off and on by turns; judge the choices."""
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
                        figures |= await _compare(name, off, on, rule, batch, options.num_pairs)
    _judge(figures)
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
    name: str, off: _Side, on: _Side, rule: AcceptanceRule, batch: int, num_pairs: int
) -> dict[str, float]:
    num_warm = WARM_JOBS if batch == 1 else 2 * WARM_JOBS
    for side in (off, on):
        await side.run(_jobs(f"{name}-warm", rule, num_warm), batch)
        side.forget()
    before = await on.counts()
    for turn in range(num_pairs):
        jobs = _jobs(f"{name}-{turn}", rule, max(LEAST_JOBS, JOBS_PER_SESSION * batch))
        for side in (off, on) if turn % 2 == 0 else (on, off):
            await side.run(jobs, batch)
    after = await on.counts()
    count = {key: after[key] - before.get(key, 0.0) for key in after}
    foreseen = count["hits"] + count["misses"]
    draft_s = count["hidden_seconds"] + count["asked_seconds"]
    ratio = ratio_of_rates(on.work, off.work)
    if ratio is None or ratio.low is None or ratio.high is None:
        raise RuntimeError(f"{name}: no tokens, or fewer than two pairs")
    figures = {
        "off_tokens_per_s": rate(off.work),
        "on_tokens_per_s": rate(on.work),
        "acceptance": on.num_accepted / on.num_drafted if on.num_drafted else 0.0,
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "chosen_share": foreseen / on.num_later_rounds,
        "hit_rate": count["hits"] / foreseen if foreseen else 0.0,
        "hidden_share": count["hidden_seconds"] / draft_s if draft_s else 0.0,
        "ahead_per_hidden": count["branch_tokens"] / max(1.0, count["hidden_tokens"]),
    }
    say(
        f"{name}: {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of "
        f"{figures['off_tokens_per_s']:.1f} tokens/s, accepted {figures['acceptance']:.2f}; "
        f"chosen in {figures['chosen_share']:.2f} of rounds, there hits {figures['hit_rate']:.2f}, "
        f"draft time hidden {figures['hidden_share']:.2f}, "
        f"{figures['ahead_per_hidden']:.1f} drafted ahead per hidden"
    )
    return {f"{name}.{key}": value for key, value in figures.items()}


def _judge(figures: dict[str, float]) -> None:
    """Say where the choice lost, and where it hid too little of the draft's time."""
    names = [name.removesuffix(".ratio") for name in figures if name.endswith(".ratio")]
    lost = [name for name in names if figures[f"{name}.ratio_high"] < 1.0]
    kept = [name for name in names if figures[f"{name}.chosen_share"] > 0.5]
    short = [name for name in kept if figures[f"{name}.hidden_share"] < LEAST_HIDDEN]
    say(f"slower than without it: {len(lost)} of {len(names)} {' '.join(lost)}".rstrip())
    say(
        f"chosen in most rounds: {len(kept)} of {len(names)}; there less than {LEAST_HIDDEN:g} of "
        f"the draft's time hidden: {len(short)} {' '.join(short)}".rstrip()
    )


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
        for index in range(count)
    ]


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - our own port
        return str(response.read(), "utf-8")
