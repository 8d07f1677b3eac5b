"""What more targets are worth: tokens/s with 1 to 8 of them, on modelled devices.

Toy targets whose forwards take a modelled time and have four seats, four sessions to a target, one
draft to four targets, and one orchestrator to four targets. All replicas are started once; each
number of targets has orchestrators of its own that know the first so many. Knows the generation
service; on one machine the processors are shared, which the modelled time hides while they suffice.

Rounds are counted; how many tokens each commits is chance, and the same chance for every number of
targets, so that it is taken over all turns together.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import Generated, GenerationClient, Job
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.local_process import launch
from specserve.tools.terminal import say, table

MODEL = "toy:vocab_size=96,seed=7,order=1"
"""It looks at one token: its tables are full after the warm-up, and forwards are their modelled
time."""

NOISE = 0.65
"""Of the drafts: about 0.6 of their tokens are accepted."""

NUM_TARGETS = (1, 2, 4, 8)
TARGETS_PER_ORCHESTRATOR = 4
TARGETS_PER_DRAFT = 4
STEP_MS = 100.0
DRAFT_STEP_MS = 5.0
SESSIONS_PER_TARGET = 4
NUM_SPECULATIVE_TOKENS = 4
NUM_TOKENS = 48
WARM_S = 3.0
WINDOW_S = 10.0
CONNECT_TIMEOUT_S = 30.0
LEAST_EFFICIENCY = 0.9
"""Of so many times one target's tokens/s."""


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """One number of targets, measured."""

    num_targets: int
    num_tokens: int
    num_rounds: int
    """Of all sessions, within the window."""
    draft_s: float
    """Waited for the draft in a round of one session."""
    verify_s: float
    """Waited for the target in it."""
    orchestrator_s: float
    """Processor time of the orchestrators for it."""

    @property
    def rounds_per_s(self) -> float:
        """Of all sessions together."""
        return self.num_rounds / WINDOW_S


async def run_pools_suite(num_targets: Sequence[int] = NUM_TARGETS) -> dict[str, float]:
    """Measure each number of targets, up and down again; say whether each is worth its place."""
    most = max(num_targets)
    config = json.dumps({"num_speculative_tokens": NUM_SPECULATIVE_TOKENS})
    spec = PairSpec(
        f"{MODEL},step_ms={STEP_MS}",
        f"{MODEL},noise={NOISE},noise_seed=1,step_ms={DRAFT_STEP_MS}",
        config,
        num_targets=most,
        num_drafts=-(-most // TARGETS_PER_DRAFT),
        num_orchestrators=0,
        num_gateways=0,
        target_flags=(f"--max-num-seqs={SESSIONS_PER_TARGET}",),
    )
    async with LocalPair(spec) as pair:
        rising = sorted(num_targets)
        turns = [await _measure(pair, number) for number in (*rising, *reversed(rising))]
    tokens_per_round = sum(each.num_tokens for each in turns) / sum(e.num_rounds for e in turns)
    # The better of two turns: what else runs on the machine only takes away.
    found = [
        max((each for each in turns if each.num_targets == number), key=lambda e: e.num_rounds)
        for number in rising
    ]
    return _told(found, tokens_per_round)


def _told(found: Sequence[PoolFigures], tokens_per_round: float) -> dict[str, float]:
    """Print the numbers of targets, fewest first, and the verdict; return the figures."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for each in found:
        linear = found[0].rounds_per_s * each.num_targets / found[0].num_targets
        values = {
            "tokens_per_s": tokens_per_round * each.rounds_per_s,
            "efficiency": each.rounds_per_s / linear,
            "draft_ms_per_round": 1e3 * each.draft_s,
            "verify_ms_per_round": 1e3 * each.verify_s,
            "orchestrator_ms_per_round": 1e3 * each.orchestrator_s,
        }
        formats = (".1f", ".3f", ".1f", ".1f", ".2f")
        cells = (format(value, how) for value, how in zip(values.values(), formats, strict=True))
        rows.append((str(each.num_targets), *cells))
        figures |= {f"pools.{each.num_targets}.{name}": value for name, value in values.items()}
    header = ("targets", "tokens/s", "of linear", "draft ms", "target ms", "orchestrator ms")
    say(table(header, rows))
    worst = min(value for name, value in figures.items() if name.endswith("efficiency"))
    verdict = "as wanted" if worst >= LEAST_EFFICIENCY else "too little"
    say(
        f"{tokens_per_round:.2f} tokens a round; ms are those of a session's round: waiting, "
        "waiting, processor time\n"
        f"worst {worst:.3f} of linear, at least {LEAST_EFFICIENCY:g} wanted: {verdict}"
    )
    return figures


async def _measure(pair: LocalPair, num_targets: int) -> PoolFigures:
    """Run a load on the first so many targets, by orchestrators that know no others."""
    num_drafts = -(-num_targets // TARGETS_PER_DRAFT)
    flags = [
        *(f"--target-address={service.address}" for service in pair.targets[:num_targets]),
        *(f"--draft-address={service.address}" for service in pair.drafts[:num_drafts]),
        f"--speculative-config={pair.spec.speculative_json()}",
        "--port=0",
    ]
    number = -(-num_targets // TARGETS_PER_ORCHESTRATOR)
    sessions = SESSIONS_PER_TARGET * num_targets // number
    async with AsyncExitStack() as stack:
        clients: list[GenerationClient] = []
        for _ in range(number):
            service = await launch("orchestrator", flags, pair.spec.env)
            stack.push_async_callback(service.stop)
            await service.wait_ready()
            clients.append(await stack.enter_async_context(GenerationClient(service.address)))
        for client in clients:
            await client.wait_ready()
            await _until_connected(client, num_targets + num_drafts)
        window = _Window(time.perf_counter() + WARM_S, WINDOW_S)
        running = [
            asyncio.create_task(_session(client, f"{num_targets}-{number}-{session}", window))
            for number, client in enumerate(clients)
            for session in range(sessions)
        ]
        await asyncio.sleep(WARM_S)
        before = [await client.status() for client in clients]
        await asyncio.sleep(WINDOW_S)
        after = [await client.status() for client in clients]
        await asyncio.gather(*running)
    cpu_s = sum(a.cpu_s - b.cpu_s for a, b in zip(after, before, strict=True))
    num_rounds = sum(a.num_rounds - b.num_rounds for a, b in zip(after, before, strict=True))
    return PoolFigures(
        num_targets,
        window.num_tokens,
        window.num_rounds,
        window.draft_s / window.num_steps,
        window.verify_s / window.num_steps,
        cpu_s / num_rounds,
    )


async def _until_connected(client: GenerationClient, num_replicas: int) -> None:
    """Wait until an orchestrator reaches all of its replicas."""
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        while True:
            replicas = (await client.status()).replicas
            if sum(replica.state == "connected" for replica in replicas) == num_replicas:
                return
            await asyncio.sleep(0.05)


@dataclass(slots=True)
class _Window:
    """The time that is measured: every session is busy before it and after it."""

    began: float
    seconds: float
    num_tokens: int = 0
    """Tokens that came within it."""
    num_rounds: int = 0
    """Blocks of tokens that came within it."""
    num_steps: int = 0
    """Rounds of the requests that ran in it, before and after it too."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    """Waited in these."""

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self.began + self.seconds

    def add(self, sent_at: float, generated: Generated) -> None:
        """Count what came within it."""
        for at_s, size in zip(generated.block_at_s, generated.block_sizes, strict=True):
            if size and 0 <= sent_at + at_s - self.began < self.seconds:
                self.num_tokens += size
                self.num_rounds += 1
        self.num_steps += generated.num_rounds
        self.draft_s += generated.record.draft_s
        self.verify_s += generated.record.verify_s


async def _session(client: GenerationClient, name: str, window: _Window) -> None:
    """Ask for one text after another until the window is over."""
    source = random.Random(name)
    turn = 0
    while not window.is_over:
        turn += 1
        job = Job(
            f"{name}-{turn}",
            # Prompts that have nothing in common: no target is anybody's home.
            tuple(source.randrange(1, 96) for _ in range(24)),
            SamplingParams(AcceptanceRule.COUPLED, source.randrange(2**32), 0, temperature=1.0),
            NUM_TOKENS,
            ignore_eos=True,
        )
        sent_at = time.perf_counter()
        window.add(sent_at, await client.generate(job))
