"""Parity and law of a small float32 pair on the device, through the services.

Parity: greedy and seeded `coupled` say the same tokens with speculation on and off. Law: counts of
short sequences against the exact law, which the target itself tells token by token
(log-probabilities of all sixteen tokens after every prefix). Knows requests; knows no model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specserve.speculation.transforms import transform
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import GenerationClient, Job
from specserve.tools.gpu_check.plan import CheckPlan
from specserve.tools.gpu_check.services import pair_spec, require_graphs
from specserve.tools.gpu_check.stages import CheckFailed, Figures
from specserve.tools.local import LocalPair
from specserve.tools.terminal import Progress
from specserve.tools.verify.chi_square import chi_square_p
from specserve.tools.verify.parity import ParityReport, compare_modes

CONCURRENCY = 48
NUM_ATTEMPTS = 4
"""At parity, while a draft was not asked in all the texts of a mode."""
LAW_PROMPT = (3, 7, 2, 11, 5, 3, 7)
NUM_LAW_TOKENS = 7
"""Decoded, so that the first ones are decided in full rounds."""

FALSE_ALARM = 1e-4
"""Odds that the law fails although nothing is wrong, shared out over its tests."""

LEAST_EXPECTED = 25.0
"""Draws of a cell: a check of minutes has few, and sees only what is grossly wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way of sampling, and how many tokens of each sequence are counted."""

    name: str
    rule: AcceptanceRule
    length: int
    top_k: int = 0
    temperature: float = 1.0

    def sampling(self, seed: int, num_logprobs: int = -1) -> SamplingParams:
        """Return the parameters of one request."""
        return SamplingParams(
            self.rule,
            seed,
            0,
            temperature=self.temperature,
            top_k=self.top_k,
            num_logprobs=num_logprobs,
        )


CASES = (
    Case("standard, all tokens", AcceptanceRule.STANDARD, 3),
    Case("standard, top-k 3, T 0.8", AcceptanceRule.STANDARD, 4, 3, 0.8),
    Case("coupled, all tokens", AcceptanceRule.COUPLED, 3),
)

Law = dict[tuple[int, ...], float]


class SmallPair:
    """The float32 pair, started when it is first asked for."""

    def __init__(
        self, plan: CheckPlan, models: Mapping[str, Path], device: str, *, enforce_eager: bool
    ) -> None:
        self._plan = plan
        self._models = models
        self._device = device
        self._enforce_eager = enforce_eager
        self._stack = AsyncExitStack()
        self._local: LocalPair | None = None
        self._client: GenerationClient | None = None

    async def client(self) -> GenerationClient:
        """Return a connection to the running pair."""
        if self._client is None:
            plan = self._plan
            spec = pair_spec(
                self._models,
                {"num_speculative_tokens": plan.num_speculative_tokens},
                device=self._device,
                dtype="float32",
                num_kv_blocks=4096,
                enforce_eager=self._enforce_eager,
            )
            self._local = local = await self._stack.enter_async_context(LocalPair(spec))
            address = local.orchestrators[0].address
            client = await self._stack.enter_async_context(GenerationClient(address))
            # First forwards load a device's kernels, and a draft that still reads the prompt is not
            # asked: short texts would end before it is ready.
            prompts = _prompts(plan.num_parity_prompts, plan.small.vocab_size)
            await client.generate_all(_warm_up_jobs(prompts), CONCURRENCY)
            self._client = client
        return self._client

    async def close(self) -> None:
        """Stop the pair. Idempotent."""
        self._client = self._local = None
        await self._stack.aclose()

    async def parity(self, figures: Figures, _limit_s: float) -> None:
        """Compare speculation on and off."""
        for attempt in range(NUM_ATTEMPTS):
            report = await self._compared()
            figures |= {**report.record(), "num_attempts": attempt + 1}
            if self._local is not None and not self._enforce_eager:
                require_graphs(self._local)
            if report.passed:
                return
            # Texts of a tiny model end within a moment; one in which the draft did not get a
            # processor proves nothing. A difference does, and is never tried again.
            if any(mode.divergences for mode in report.modes):
                raise CheckFailed("speculation changed tokens, by more than near-ties")
        raise CheckFailed(f"speculation was not used in {NUM_ATTEMPTS} attempts")

    async def _compared(self) -> ParityReport:
        client, plan = await self.client(), self._plan
        reports = await compare_modes(
            client,
            _prompts(plan.num_parity_prompts, plan.small.vocab_size),
            max_tokens=plan.num_parity_tokens,
            concurrency=CONCURRENCY,
            progress=Progress(),
            ignore_eos=True,
        )
        return ParityReport("float32", "draft_model", reports)

    async def law(self, figures: Figures, _limit_s: float) -> None:
        """Compare counts of sequences with the exact law."""
        client = await self.client()
        threshold = FALSE_ALARM / (2 * len(CASES))
        cases: list[dict[str, object]] = []
        figures |= {"threshold": threshold, "num_draws": self._plan.num_draws, "cases": cases}
        failed = []
        for index, case in enumerate(CASES):
            law = await _exact_law(client, case, self._plan.small.vocab_size)
            counts, acceptance = await _draw(client, case, index, self._plan.num_draws)
            p_values = [_p_value(counts, law, length) for length in (2, case.length)]
            impossible = sum(n for sequence, n in counts.items() if law.get(sequence, 0.0) == 0.0)
            cases.append(
                {
                    "case": case.name,
                    "acceptance_rate": acceptance,
                    "p_values": p_values,
                    "num_impossible": impossible,
                }
            )
            if min(p_values) < threshold or impossible or acceptance == 0.0:
                failed.append(case.name)
        if failed:
            raise CheckFailed(f"not the target's law: {'; '.join(failed)}")


def _warm_up_jobs(prompts: Sequence[tuple[str, tuple[int, ...]]]) -> list[Job]:
    return [
        Job(
            f"warm-{rule}-{name}",
            token_ids,
            SamplingParams(rule, seed=0, choice=0, temperature=float(rule != "greedy")),
            NUM_LAW_TOKENS,
            ignore_eos=True,
        )
        for rule in AcceptanceRule
        for name, token_ids in prompts
    ]


def _prompts(count: int, vocab_size: int) -> list[tuple[str, tuple[int, ...]]]:
    """Make prompts of many lengths; the longest is prefilled in pieces."""
    rng = np.random.default_rng(5)
    lengths = [600, *(1 + 7 * index % 90 for index in range(count - 1))]
    return [
        (f"prompt-{index}", tuple(rng.integers(2, vocab_size, length).tolist()))
        for index, length in enumerate(lengths)
    ]


async def _exact_law(client: GenerationClient, case: Case, vocab_size: int) -> Law:
    """Ask the target, without any draft, for the distribution after every prefix."""
    law: Law = {(): 1.0}
    for _ in range(case.length):
        prefixes = [prefix for prefix, weight in law.items() if weight > 0.0]
        jobs = [
            Job(
                f"law-{case.name}-{'-'.join(map(str, prefix))}",
                (*LAW_PROMPT, *prefix),
                case.sampling(seed=1, num_logprobs=vocab_size),
                max_tokens=1,
                num_speculative_tokens=0,
                ignore_eos=True,
            )
            for prefix in prefixes
        ]
        longer: Law = {}
        for prefix, done in zip(
            prefixes, await client.generate_all(jobs, CONCURRENCY), strict=True
        ):
            row = done.logprobs[0]
            logits = np.full(vocab_size, -math.inf)
            logits[list(row.token_ids)] = row.logprobs
            step = transform(logits, case.sampling(seed=1))
            for token_id, p in zip(step.token_ids.tolist(), step.probs.tolist(), strict=True):
                longer[(*prefix, token_id)] = law[prefix] * p
        law = longer
    return law


async def _draw(
    client: GenerationClient, case: Case, index: int, num_draws: int
) -> tuple[Counter[tuple[int, ...]], float]:
    """Decode sequences with speculation; their counts, and the acceptance rate."""
    jobs = [
        Job(
            f"draw-{index}-{number}",
            LAW_PROMPT,
            case.sampling(seed=(index << 32) + number),
            NUM_LAW_TOKENS,
            ignore_eos=True,
        )
        for number in range(num_draws)
    ]
    done = await client.generate_all(jobs, CONCURRENCY)
    drafted = sum(generated.record.num_draft_tokens for generated in done)
    accepted = sum(generated.record.num_accepted_draft_tokens for generated in done)
    counts = Counter(generated.token_ids[: case.length] for generated in done)
    return counts, accepted / max(1, drafted)


def _p_value(counts: Counter[tuple[int, ...]], law: Law, length: int) -> float:
    num_draws = counts.total()
    expected = _marginal(law, length)
    observed = _marginal(counts, length)
    keys = sorted(expected)
    return chi_square_p(
        [observed.get(key, 0.0) for key in keys],
        [num_draws * expected[key] for key in keys],
        least=LEAST_EXPECTED,
    )


def _marginal(weights: Law | Counter[tuple[int, ...]], length: int) -> Law:
    marginal: Law = {}
    for sequence, weight in weights.items():
        key: Sequence[int] = sequence[:length]
        marginal[tuple(key)] = marginal.get(tuple(key), 0.0) + weight
    return marginal
