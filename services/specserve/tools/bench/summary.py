"""What one side of a comparison showed, from its waves: latencies, rates, acceptance, stages.

Pure: measured values in, a frozen record out. Fields are named as users of this field know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.tools.bench.sample import ORIGINS, Sample, Wave, good_samples
from specserve.tools.bench.statistics import Quantiles, quantiles

MAX_ERRORS = 5
"""Distinct errors that a record keeps; one cause tends to fail many requests."""


@dataclass(frozen=True, slots=True)
class Position:
    """Acceptance at one position of the draft block."""

    num_verified: int
    num_accepted: int
    rate: float
    """Accepted / verified; those that come after a rejection count as verified."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What speculation did."""

    num_drafts: int
    """Rounds that verified at least one draft token."""
    num_plain_steps: int
    """Rounds without draft tokens."""
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float
    """Accepted / verified draft tokens."""
    mean_acceptance_length: float | None
    """1 + accepted / drafts: the recovered or bonus token included; None without drafts."""
    tokens_per_round: float
    """Over all rounds, those without draft tokens too."""
    by_position: tuple[Position, ...]
    num_late_proposals: int
    num_target_reopens: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Time in one stage of the round, over all requests."""

    name: str
    total_s: float
    ms_per_round: float
    share_of_e2e: float


@dataclass(frozen=True, slots=True)
class CategorySummary:
    """One category of prompts."""

    category: str
    num_requests: int
    tokens_per_s: float
    """Tokens over the sum of the requests' own times; one request's speed."""
    mean_acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What one side showed."""

    num_requests: int
    num_failed: int
    errors: tuple[str, ...]
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    wall_s: float
    tokens_per_s: float
    tokens_per_minute: float
    requests_per_s: float
    ttft_s: Quantiles | None
    itl_s: Quantiles | None
    tpot_s: Quantiles | None
    e2e_s: Quantiles | None
    block_gap_s: Quantiles | None
    """Time between two blocks of tokens."""
    prompt_length: Quantiles | None
    output_length: Quantiles | None
    tokens_by_origin: dict[str, int]
    """Empty where the server does not say."""
    acceptance: Acceptance | None
    stages: tuple[Stage, ...]
    batch_size: Quantiles | None
    """Choices being decoded, over the looks taken while the waves ran."""
    kv_blocks_peak: dict[str, int]
    """By role."""
    categories: tuple[CategorySummary, ...]

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round that verified a draft; None without any."""
        return None if self.acceptance is None else self.acceptance.mean_acceptance_length


def summarise(waves: Sequence[Wave]) -> Summary:
    """Summarise one side; failed requests count as failed and in nothing else."""
    samples = good_samples(waves)
    every = [sample for wave in waves for sample in wave.samples]
    errors = tuple(dict.fromkeys(sample.error for sample in every if sample.error))
    wall_s = sum(wave.wall_s for wave in waves)
    num_tokens = sum(sample.num_tokens for sample in samples)
    tokens_per_s = num_tokens / wall_s if wall_s > 0 else 0.0
    readings = [reading for wave in waves for reading in wave.readings]
    peaks: dict[str, int] = {}
    for reading in readings:
        for role, used in reading.kv_blocks_used.items():
            peaks[role] = max(peaks.get(role, 0), used)
    return Summary(
        num_requests=len(every),
        num_failed=len(every) - len(samples),
        errors=errors[:MAX_ERRORS],
        num_prompt_tokens=sum(sample.num_prompt_tokens for sample in samples),
        num_cached_prompt_tokens=sum(
            sample.speculated.num_cached_prompt_tokens for sample in samples if sample.speculated
        ),
        num_output_tokens=num_tokens,
        wall_s=wall_s,
        tokens_per_s=tokens_per_s,
        tokens_per_minute=60 * tokens_per_s,
        requests_per_s=len(samples) / wall_s if wall_s > 0 else 0.0,
        ttft_s=quantiles([s.ttft_s for s in samples if s.ttft_s is not None]),
        itl_s=quantiles([value for s in samples for value in s.itl_s]),
        tpot_s=quantiles([s.tpot_s for s in samples if s.tpot_s is not None]),
        e2e_s=quantiles([s.e2e_s for s in samples]),
        block_gap_s=quantiles([value for s in samples for value in s.gaps_s]),
        prompt_length=quantiles([s.num_prompt_tokens for s in samples]),
        output_length=quantiles([s.num_tokens for s in samples]),
        tokens_by_origin=_by_origin(samples),
        acceptance=acceptance_of(samples),
        stages=_stages(samples),
        batch_size=quantiles([reading.num_running for reading in readings]),
        kv_blocks_peak=peaks,
        categories=_categories(samples),
    )


def acceptance_of(samples: Sequence[Sample]) -> Acceptance | None:
    """Add up what speculation did; None where no server said."""
    records = [sample.speculated for sample in samples if sample.speculated is not None]
    if not records:
        return None
    steps = [
        step
        for record in records
        for step in zip(record.per_step_drafted, record.per_step_accepted, strict=True)
    ]
    num_drafted = sum(drafted for drafted, _ in steps)
    num_accepted = sum(accepted for _, accepted in steps)
    num_plain = sum(record.num_plain_steps for record in records)
    num_tokens = sum(record.num_tokens for record in records)
    positions = []
    for position in range(max((drafted for drafted, _ in steps), default=0)):
        verified = sum(drafted > position for drafted, _ in steps)
        accepted = sum(accepted > position for _, accepted in steps)
        positions.append(Position(verified, accepted, accepted / verified))
    return Acceptance(
        num_drafts=len(steps),
        num_plain_steps=num_plain,
        num_draft_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
        acceptance_rate=num_accepted / num_drafted if num_drafted else 0.0,
        mean_acceptance_length=1 + num_accepted / len(steps) if steps else None,
        tokens_per_round=num_tokens / max(1, len(steps) + num_plain),
        by_position=tuple(positions),
        num_late_proposals=sum(record.num_late_proposals for record in records),
        num_target_reopens=sum(record.num_target_reopens for record in records),
    )


def _by_origin(samples: Sequence[Sample]) -> dict[str, int]:
    if not any(sample.origins for sample in samples):
        return {}
    return {origin: sum(sample.origin_counts[origin] for sample in samples) for origin in ORIGINS}


def _stages(samples: Sequence[Sample]) -> tuple[Stage, ...]:
    records = [sample.speculated for sample in samples if sample.speculated is not None]
    names = dict.fromkeys(name for record in records for name in record.stage_s)
    num_rounds = max(1, sum(record.num_rounds for record in records))
    e2e_s = sum(sample.e2e_s for sample in samples)
    totals = {name: sum(record.stage_s.get(name, 0.0) for record in records) for name in names}
    return tuple(
        Stage(name, total, 1e3 * total / num_rounds, total / e2e_s if e2e_s > 0 else 0.0)
        for name, total in totals.items()
    )


def _categories(samples: Sequence[Sample]) -> tuple[CategorySummary, ...]:
    rows = []
    for category in dict.fromkeys(sample.category for sample in samples):
        own = [sample for sample in samples if sample.category == category]
        seconds = sum(sample.e2e_s for sample in own)
        acceptance = acceptance_of(own)
        rows.append(
            CategorySummary(
                category,
                len(own),
                sum(sample.num_tokens for sample in own) / seconds if seconds > 0 else 0.0,
                None if acceptance is None else acceptance.mean_acceptance_length,
            )
        )
    return tuple(rows)
