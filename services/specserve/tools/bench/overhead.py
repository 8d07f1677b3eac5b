"""What a round costs when the models cost nothing: toy pair, step time 0, four plain processes.

Knows the generation service; the clock is the client's.
"""

from __future__ import annotations

import statistics

from specserve.speculation.constraints import TokenConstraints
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import Generated, GenerationClient, Job
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.terminal import say

TARGET = "toy:vocab_size=96,seed=7,order=1"
DRAFT = "toy:vocab_size=96,seed=7,order=1,noise=0.7,noise_seed=1"
"""One row a last token: warmed once, the tables cost nothing, whatever text a rule draws."""
NUM_TOKENS = 400
NUM_SOLO = 5
NUM_SESSIONS = 32
NUM_WAVES = 3

KINDS = {
    "greedy": (AcceptanceRule.GREEDY, None),
    "standard": (AcceptanceRule.STANDARD, None),
    "constrained": (
        AcceptanceRule.GREEDY,
        TokenConstraints(
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.05,
            logit_bias=((9, 1.0), (11, -100.0)),
            bad_words=((5, 6, 7), (8,)),
            min_tokens=NUM_TOKENS,
        ),
    ),
}
"""What is measured: the acceptance rule, and what a request asks of single tokens."""


async def run_overhead_suite() -> dict[str, float]:
    """Measure one session, then NUM_SESSIONS at once: greedy, standard, greedy with constraints."""
    spec = PairSpec(TARGET, DRAFT, num_gateways=0)
    figures: dict[str, float] = {}
    async with (
        LocalPair(spec) as local,
        GenerationClient(local.orchestrators[0].address) as client,
    ):
        await client.wait_ready()
        for name in KINDS:
            for i in range(NUM_SOLO):
                # The same tokens as below: what the toy's table costs to fill is no round's cost.
                await client.generate(_job(name, "warm", i))
            solo = [await client.generate(_job(name, "solo", i)) for i in range(NUM_SOLO)]
            figures |= _report_solo(name, solo)
            before = await client.status()
            waves: list[Generated] = []
            wall = 0.0
            for wave in range(NUM_WAVES):
                jobs = [_job(name, f"wave{wave}", i) for i in range(NUM_SESSIONS)]
                done = await client.generate_all(jobs, NUM_SESSIONS)
                waves += done
                wall += max(g.total_s for g in done)
            after = await client.status()
            rounds = sum(g.num_rounds for g in waves)
            cpu_ms = 1e3 * (after.cpu_s - before.cpu_s) / (after.num_rounds - before.num_rounds)
            wall_ms = 1e3 * wall / rounds
            say(
                f"{name}: {NUM_SESSIONS} sessions: {wall_ms:.3f} ms per session-round, "
                f"orchestrator processor time {cpu_ms:.3f} ms"
            )
            figures[f"overhead.{name}.{NUM_SESSIONS}.wall_ms"] = wall_ms
            figures[f"overhead.{name}.{NUM_SESSIONS}.orchestrator_cpu_ms"] = cpu_ms
    return figures


def _report_solo(name: str, solo: list[Generated]) -> dict[str, float]:
    gaps = [
        1e3 * (b - a) for g in solo for a, b in zip(g.block_at_s, g.block_at_s[1:], strict=False)
    ]
    p50 = statistics.median(gaps)
    p90 = statistics.quantiles(gaps, n=10)[-1]
    say(f"{name}: 1 session: p50 {p50:.3f} ms, p90 {p90:.3f} ms per round ({len(gaps)} rounds)")
    return {f"overhead.{name}.1.p50_ms": p50, f"overhead.{name}.1.p90_ms": p90}


def _job(kind: str, name: str, index: int) -> Job:
    rule, constraints = KINDS[kind]
    temperature = 0.0 if rule is AcceptanceRule.GREEDY else 1.0
    return Job(
        f"{kind}-{name}-{index}",
        (5, 6, 7, 3 + index % 32),
        SamplingParams(
            rule, seed=index, choice=0, temperature=temperature, constraints=constraints
        ),
        NUM_TOKENS,
        ignore_eos=True,
    )
