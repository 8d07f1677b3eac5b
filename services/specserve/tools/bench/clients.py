"""Sends prompts to a running system and measures the answers: over gRPC, as a gateway does.

Knows the generation service; HTTP is in `http.py`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol

from specserve.rpc.v1 import generation_pb2
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.bench.sample import BenchPrompt, Reading, Sample, Speculated
from specserve.tools.generation_client import Generated, GenerationClient, Job


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What every request asks for."""

    max_tokens: int
    temperature: float
    ignore_eos: bool
    """Decode to max_tokens, so that both sides of a comparison do the same work."""
    seed: int
    """Each prompt's own seed is made of this and its id: the same on every side, in every run."""

    def seed_of(self, prompt: BenchPrompt) -> int:
        """Return the seed of one prompt's request."""
        return self.seed ^ zlib.crc32(prompt.prompt_id.encode())


class ServingClient(Protocol):
    """A way to a running system."""

    async def decode(
        self,
        prompt: BenchPrompt,
        settings: RequestSettings,
        request_id: str,
        num_speculative_tokens: int | None,
    ) -> Sample:
        """Decode one prompt.

        Args:
            num_speculative_tokens: None takes what is configured; 0 switches speculation off.

        Raises:
            SpecServeError: the request was refused or could not go on.
        """
        ...

    async def read(self) -> Reading | None:
        """Look at the running system; None where it does not say."""
        ...


class GrpcServingClient:
    """Speaks to an orchestrator."""

    def __init__(self, client: GenerationClient) -> None:
        self._client = client

    async def decode(
        self,
        prompt: BenchPrompt,
        settings: RequestSettings,
        request_id: str,
        num_speculative_tokens: int | None,
    ) -> Sample:
        """Decode one prompt."""
        greedy = settings.temperature == 0
        sampling = SamplingParams(
            AcceptanceRule.GREEDY if greedy else AcceptanceRule.STANDARD,
            seed=settings.seed_of(prompt),
            choice=0,
            temperature=settings.temperature,
        )
        done = await self._client.generate(
            Job(
                request_id,
                prompt.token_ids,
                sampling,
                settings.max_tokens,
                num_speculative_tokens,
                settings.ignore_eos,
            )
        )
        return _sample(prompt, done)

    async def read(self) -> Reading | None:
        """Ask the orchestrator for its state."""
        status = await self._client.status()
        used: dict[str, int] = {}
        for replica in status.replicas:
            blocks = replica.load.num_blocks - replica.load.num_free_blocks
            used[replica.role] = used.get(replica.role, 0) + blocks
        return Reading(status.num_running, used)


def _sample(prompt: BenchPrompt, done: Generated) -> Sample:
    blocks = [
        (at, size) for at, size in zip(done.block_at_s, done.block_sizes, strict=True) if size
    ]
    return Sample(
        prompt.prompt_id,
        prompt.category,
        len(prompt.token_ids),
        block_at_s=tuple(at for at, _ in blocks),
        block_sizes=tuple(size for _, size in blocks),
        e2e_s=done.total_s,
        origins=done.origins,
        speculated=_speculated(done.record),
    )


def _speculated(record: generation_pb2.SpeculationRecord) -> Speculated:
    return Speculated(
        per_step_drafted=tuple(record.per_step_drafted),
        per_step_accepted=tuple(record.per_step_accepted),
        num_plain_steps=record.num_plain_steps,
        num_recovered_tokens=record.num_recovered_tokens,
        num_bonus_tokens=record.num_bonus_tokens,
        num_plain_tokens=record.num_plain_tokens,
        num_late_proposals=record.num_late_proposals,
        num_target_reopens=record.num_target_reopens,
        num_cached_prompt_tokens=record.cached_prompt_tokens,
        stage_s=stage_seconds(
            {field.name: getattr(record, field.name) for field in record.DESCRIPTOR.fields}
        ),
    )


def stage_seconds(fields: dict[str, object]) -> dict[str, float]:
    """Pick the stage times of a record: every number whose name ends in `_s`."""
    return {
        name: float(value)
        for name, value in fields.items()
        if name.endswith("_s") and isinstance(value, int | float)
    }
