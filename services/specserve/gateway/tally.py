"""Sums over one body: usage, and what speculation did. Pure counting; knows no shape of answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.gateway.answers import (
    Metrics,
    PromptTokensDetails,
    ProposerFigures,
    SpeculativeDecoding,
    Usage,
)
from specserve.gateway.blocks import Block
from specserve.rpc.codec import unpack_methods
from specserve.rpc.v1.generation_pb2 import ProposerCounts, SpeculationRecord


@dataclass(slots=True)
class Tally:
    """Counts blocks as they are answered."""

    prompt_lengths: tuple[int, ...]
    """Tokens of each prompt."""
    n: int
    """Choices per prompt."""
    completion_tokens: int = 0
    """Tokens of the blocks so far."""
    records: dict[int, SpeculationRecord] = field(default_factory=dict)
    """{choice: what speculation did}, of finished choices."""

    def add(self, block: Block) -> None:
        """Count one block."""
        self.completion_tokens += len(block.token_ids)
        if block.record is not None:
            self.records[block.index] = block.record

    def usage(self) -> Usage:
        """Return the usage so far."""
        prompt_tokens = sum(self.prompt_lengths)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens()),
        )

    def cached_tokens(self) -> int:
        """Prompt tokens that were cached before this request.

        A prompt's later choices find what its first one has just computed, so the least counts. A
        choice that was carried over finds its own output too: that is no prompt.
        """
        total = 0
        for prompt, length in enumerate(self.prompt_lengths):
            choices = range(prompt * self.n, (prompt + 1) * self.n)
            found = [self.records[i].cached_prompt_tokens for i in choices if i in self.records]
            total += min(length, *found) if found else 0
        return total

    def metrics(self, detailed: bool) -> Metrics:
        """Return what speculation did, over the finished choices."""
        records = [self.records[index] for index in sorted(self.records)]
        return Metrics(speculative_decoding=summarise(records, detailed))


def summarise(records: Sequence[SpeculationRecord], detailed: bool) -> SpeculativeDecoding:
    """Add records up."""
    steps = sum(record.num_spec_steps for record in records)
    drafted = sum(record.num_draft_tokens for record in records)
    accepted = sum(record.num_accepted_draft_tokens for record in records)
    return SpeculativeDecoding(
        mean_acceptance_length=1 + accepted / steps if steps else 1.0,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        acceptance_histogram=_histogram(records, steps),
        num_spec_steps=steps,
        num_plain_steps=sum(record.num_plain_steps for record in records),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=max((record.num_speculative_tokens for record in records), default=0),
        num_recovered_tokens=sum(record.num_recovered_tokens for record in records),
        num_bonus_tokens=sum(record.num_bonus_tokens for record in records),
        num_plain_tokens=sum(record.num_plain_tokens for record in records),
        num_late_proposals=sum(record.num_late_proposals for record in records),
        draft_s=sum(record.draft_s for record in records),
        verify_s=sum(record.verify_s for record in records),
        proposers=_proposers(records),
        per_step_drafted=[list(r.per_step_drafted) for r in records] if detailed else None,
        per_step_accepted=[list(r.per_step_accepted) for r in records] if detailed else None,
        per_step_proposer=(
            [[_name_of(number) for number in r.per_step_proposer] for r in records]
            if detailed
            else None
        ),
    )


def _proposers(records: Sequence[SpeculationRecord]) -> dict[str, ProposerFigures]:
    totals: dict[str, ProposerCounts] = {}
    for counts in (counts for record in records for counts in record.proposers):
        total = totals.setdefault(_name_of(counts.proposer), ProposerCounts())
        total.num_spec_steps += counts.num_spec_steps
        total.num_draft_tokens += counts.num_draft_tokens
        total.num_accepted_draft_tokens += counts.num_accepted_draft_tokens
    return {
        name: ProposerFigures(
            num_spec_steps=total.num_spec_steps,
            num_draft_tokens=total.num_draft_tokens,
            num_accepted_draft_tokens=total.num_accepted_draft_tokens,
        )
        for name, total in totals.items()
    }


def _name_of(number: int) -> str:
    """Name a proposer; an orchestrator of a newer build may have others."""
    return next(iter(unpack_methods([number])), "unknown")


def _histogram(records: Sequence[SpeculationRecord], num_spec_steps: int) -> list[int]:
    width = max((len(record.accepted_per_position) for record in records), default=0)
    at_least = [num_spec_steps] + [
        sum(r.accepted_per_position[i] for r in records if i < len(r.accepted_per_position))
        for i in range(width)
    ]
    # Acceptance is a prefix: rounds with exactly i are those with i, less those with i + 1.
    return [here - after for here, after in zip(at_least, [*at_least[1:], 0], strict=True)]
