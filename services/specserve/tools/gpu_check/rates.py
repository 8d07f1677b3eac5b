"""Tokens per second of the whole system with and without speculation, acceptance being synthetic.

Knows requests and records; the services are plain processes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import Generated, GenerationClient, Job
from specserve.tools.gpu_check.plan import CheckPlan
from specserve.tools.gpu_check.services import OFFLINE, pair_spec, require_graphs
from specserve.tools.gpu_check.stages import Figures
from specserve.tools.gpu_check.steps import step_ms
from specserve.tools.local import LocalPair
from specserve.tools.local_process import launch
from specserve.tools.terminal import Progress
from specserve.tools.verify.parity import MODES, compare_modes

NUM_DIVERGENCE_PROMPTS = 8
NUM_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Rate:
    """One way of decoding one batch."""

    batch: int
    rule: str
    num_speculative_tokens: int
    tokens_per_s: float
    """All requests together, between a request's first token and its last."""
    round_ms: float
    """Median over requests, of the time between commits."""
    mean_acceptance_length: float
    """Committed tokens a round with draft tokens, the bonus included; 0 without any."""
    overhead_ms: float | None
    """round_ms less the steps it needs (K of the draft, one of the target); None where these were
    not measured."""


class LargePair:
    """The pair of the full shapes, and what its steps cost."""

    def __init__(
        self,
        plan: CheckPlan,
        models: Mapping[str, Path],
        device: str,
        steps: Figures,
        *,
        enforce_eager: bool,
    ) -> None:
        """Args:
        steps: figures of the steps stage, for the overhead; may be empty.
        """
        self._plan = plan
        self._models = models
        self._device = device
        self._steps = steps
        self._enforce_eager = enforce_eager
        self._stack = AsyncExitStack()
        self._local: LocalPair | None = None

    async def rates(self, figures: Figures, _limit_s: float) -> None:
        """Measure every batch, off and on; and one batch that samples."""
        plan = self._plan
        local = await self._started()
        client = GenerationClient(local.orchestrators[0].address)
        rates: list[dict[str, object]] = []
        figures |= {"num_speculative_tokens": plan.num_speculative_tokens, "rates": rates}
        # A graph is captured at its shape's first use: then all that is timed must have been seen.
        num_warm_up_tokens = NUM_WARM_UP_TOKENS if self._enforce_eager else plan.num_rate_tokens
        async with client:
            pair = await client.wait_ready()
            figures["synthetic_acceptance_rates"] = list(pair.synthetic_acceptance_rates)
            kinds = [(batch, AcceptanceRule.GREEDY) for batch in plan.batches]
            kinds.append((plan.batches[1], AcceptanceRule.STANDARD))
            for batch, rule in kinds:
                for k in (0, plan.num_speculative_tokens):
                    await self._decode(client, "warm", batch, rule, k, num_warm_up_tokens)
                    done = await self._decode(client, "run", batch, rule, k, plan.num_rate_tokens)
                    if not self._enforce_eager:
                        require_graphs(local)
                    rates.append(asdict(self._rate(done, batch, rule, k)))

    async def divergences(self, figures: Figures, _limit_s: float) -> None:
        """Count where bfloat16 parts greedy texts with and without drafts: information only."""
        local = await self._started()
        addresses = (
            f"--target-address={local.targets[0].address}",
            f"--draft-address={local.drafts[0].address}",
        )
        config = {
            "model": str(self._models["draft"]),
            "num_speculative_tokens": self._plan.num_speculative_tokens,
        }
        flags = (*addresses, f"--speculative-config={json.dumps(config)}", "--port=0")
        exact = await launch("orchestrator", flags, OFFLINE)
        local.orchestrators.append(exact)  # stopped with the others
        await exact.wait_ready()
        prompts = self._prompts(NUM_DIVERGENCE_PROMPTS)
        async with GenerationClient(exact.address) as client:
            await client.wait_ready()
            (report,) = await compare_modes(
                client,
                [(str(index), ids) for index, ids in enumerate(prompts)],
                max_tokens=self._plan.num_rate_tokens,
                concurrency=len(prompts),
                progress=Progress(),
                modes=MODES[:1],
                ignore_eos=True,
            )
        figures |= {
            "num_texts": len(prompts),
            "num_tokens": report.num_tokens,
            "num_diverged": len(report.divergences),
            "divergences": [asdict(divergence) for divergence in report.divergences],
        }

    async def close(self) -> None:
        """Stop the pair. Idempotent."""
        self._local = None
        await self._stack.aclose()

    async def _started(self) -> LocalPair:
        if self._local is None:
            plan = self._plan
            spec = pair_spec(
                self._models,
                {
                    "num_speculative_tokens": plan.num_speculative_tokens,
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_length": plan.acceptance_length,
                },
                device=self._device,
                dtype=plan.dtype,
                num_kv_blocks=plan.num_kv_blocks,
                enforce_eager=self._enforce_eager,
            )
            self._local = await self._stack.enter_async_context(LocalPair(spec))
        return self._local

    async def _decode(
        self,
        client: GenerationClient,
        name: str,
        batch: int,
        rule: AcceptanceRule,
        k: int,
        num_tokens: int,
    ) -> list[Generated]:
        temperature = 0.0 if rule is AcceptanceRule.GREEDY else 1.0
        jobs = [
            Job(
                f"{name}-{rule}-{batch}-{k}-{index}-{time.monotonic_ns()}",
                prompt,
                SamplingParams(rule, seed=index, choice=0, temperature=temperature),
                num_tokens,
                k,
                ignore_eos=True,
            )
            for index, prompt in enumerate(self._prompts(batch))
        ]
        return await client.generate_all(jobs, batch)

    def _prompts(self, count: int) -> list[tuple[int, ...]]:
        plan = self._plan
        ids = np.random.default_rng(3).integers(
            2, plan.target.vocab_size, (count, plan.prompt_length)
        )
        return [tuple(row) for row in ids.tolist()]

    def _rate(self, done: Sequence[Generated], batch: int, rule: AcceptanceRule, k: int) -> Rate:
        spans = [generated.block_at_s[-1] - generated.block_at_s[0] for generated in done]
        tokens = [len(generated.token_ids) - generated.block_sizes[0] for generated in done]
        rounds = [max(1, generated.num_rounds - 1) for generated in done]
        round_ms = statistics.median(
            1e3 * span / count for span, count in zip(spans, rounds, strict=True)
        )
        drafted = sum(generated.record.num_spec_steps for generated in done)
        accepted = sum(generated.record.num_accepted_draft_tokens for generated in done)
        return Rate(
            batch,
            rule.value,
            k,
            sum(count / span for count, span in zip(tokens, spans, strict=True)),
            round_ms,
            1 + accepted / drafted if drafted else 0.0,
            self._overhead_ms(round_ms, batch, rule, k),
        )

    def _overhead_ms(
        self, round_ms: float, batch: int, rule: AcceptanceRule, k: int
    ) -> float | None:
        target = step_ms(self._steps, "target", k + 1, batch)
        draft = step_ms(self._steps, "draft", 1, batch)
        if target is None or draft is None or rule is not AcceptanceRule.GREEDY:
            return None
        return round_ms - target - k * draft
