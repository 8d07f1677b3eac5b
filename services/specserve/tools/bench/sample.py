"""One measured request: when its blocks came, and what speculation did for it.

Values and their derived times alone; knows no service. Times are seconds from when the request was
due, so that a request that was sent late is not made to look quick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

ORIGINS = ("accepted", "recovered", "bonus", "plain")
"""Where an emitted token can come from."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt, ready to be sent."""

    prompt_id: str
    category: str
    text: str
    """The user's turn."""
    token_ids: tuple[int, ...]
    """The same as a one-turn chat; empty when only the server has the tokenizer."""


@dataclass(frozen=True, slots=True)
class Speculated:
    """What speculation did for one request, over emitted tokens only."""

    per_step_drafted: tuple[int, ...] = ()
    """Draft tokens verified, one entry per round that had any."""
    per_step_accepted: tuple[int, ...] = ()
    """Draft tokens accepted and emitted, one entry per round that had any."""
    num_plain_steps: int = 0
    """Rounds without draft tokens."""
    num_recovered_tokens: int = 0
    num_bonus_tokens: int = 0
    num_plain_tokens: int = 0
    num_late_proposals: int = 0
    num_target_reopens: int = 0
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that the target found in its prefix cache."""
    stage_s: dict[str, float] = field(default_factory=dict)
    """Seconds by stage of the round, such as draft_s."""

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Draft tokens accepted and emitted."""
        return sum(self.per_step_accepted)

    @property
    def num_rounds(self) -> int:
        """Rounds, with and without draft tokens."""
        return len(self.per_step_drafted) + self.num_plain_steps

    @property
    def num_tokens(self) -> int:
        """Tokens by these counts; equals what was emitted."""
        return (
            self.num_accepted_draft_tokens
            + self.num_recovered_tokens
            + self.num_bonus_tokens
            + self.num_plain_tokens
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One request and what came of it."""

    prompt_id: str
    category: str
    num_prompt_tokens: int
    block_at_s: tuple[float, ...] = ()
    """When each block of tokens came."""
    block_sizes: tuple[int, ...] = ()
    """Tokens of each block; none is 0."""
    e2e_s: float = 0.0
    """When the answer ended."""
    origins: tuple[str, ...] = ()
    """Of each token, where the server says so."""
    speculated: Speculated | None = None
    """None where the server does not say."""
    error: str = ""
    """Why it failed; empty when it did not."""

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(self.block_sizes)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None when none came."""
        return self.block_at_s[0] if self.block_at_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first block; None when none came after it."""
        after = sum(self.block_sizes[1:])
        return (self.block_at_s[-1] - self.block_at_s[0]) / after if after else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies: the time between two blocks, shared out among the later's tokens.

        As the gateway's histogram counts it, so that the two can be compared.
        """
        return tuple(
            gap / size
            for gap, size in zip(self.gaps_s, self.block_sizes[1:], strict=True)
            for _ in range(size)
        )

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between two blocks: what a reader sees as a pause."""
        return tuple(b - a for a, b in zip(self.block_at_s, self.block_at_s[1:], strict=False))

    @property
    def origin_counts(self) -> dict[str, int]:
        """Tokens by origin."""
        counts = Counter(self.origins)
        return {origin: counts[origin] for origin in ORIGINS}


def checked(sample: Sample) -> Sample:
    """Return the sample, or the same as failed when its own counts disagree."""
    speculated = sample.speculated
    if sample.error or speculated is None:
        return sample
    told = {
        "accepted": speculated.num_accepted_draft_tokens,
        "recovered": speculated.num_recovered_tokens,
        "bonus": speculated.num_bonus_tokens,
        "plain": speculated.num_plain_tokens,
    }
    complaint = ""
    if speculated.num_tokens != sample.num_tokens:
        complaint = f"{sample.num_tokens} tokens came, the record counts {speculated.num_tokens}"
    elif sample.origins and told != sample.origin_counts:
        complaint = f"tokens came as {sample.origin_counts}, the record counts {told}"
    return failed(sample, complaint) if complaint else sample


def failed(sample: Sample, error: str) -> Sample:
    """Return the request as failed; what had come of it is left out of every figure."""
    return Sample(sample.prompt_id, sample.category, sample.num_prompt_tokens, error=error)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at the running system showed."""

    num_running: int
    """Choices being decoded."""
    kv_blocks_used: dict[str, int]
    """By role: blocks of the KV pools that sessions hold."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that were measured together."""

    samples: tuple[Sample, ...]
    wall_s: float
    """From the first request's due time to the last answer's end."""
    readings: tuple[Reading, ...] = ()
    late_s: tuple[float, ...] = ()
    """How late the client itself sent each request; a client that is late measures itself."""

    @property
    def good(self) -> tuple[Sample, ...]:
        """The requests that did not fail."""
        return tuple(sample for sample in self.samples if not sample.error)

    @property
    def num_tokens(self) -> int:
        """Tokens of the requests that did not fail."""
        return sum(sample.num_tokens for sample in self.good)


def joined(waves: Sequence[Wave]) -> Wave:
    """Return waves that ran one after the other as one; what lay between them is no part of it."""
    return Wave(
        tuple(sample for wave in waves for sample in wave.samples),
        sum(wave.wall_s for wave in waves),
        tuple(reading for wave in waves for reading in wave.readings),
        tuple(late_s for wave in waves for late_s in wave.late_s),
    )


def good_samples(waves: Sequence[Wave]) -> list[Sample]:
    """Return the requests of all waves that did not fail."""
    return [sample for wave in waves for sample in wave.good]
