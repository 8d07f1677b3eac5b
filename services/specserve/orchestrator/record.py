"""What speculation did for one request, counted over emitted tokens only. Knows numbers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from specserve.orchestrator.proposer import ProposerName
from specserve.speculation.length_choice import Reason
from specserve.speculation.types import Verification


class TokenOrigin(Enum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    PLAIN = "plain"


def origins_of(num_draft_tokens: int, verdict: Verification) -> tuple[TokenOrigin, ...]:
    """Name the origin of each of the num_accepted + 1 tokens of a round."""
    if num_draft_tokens == 0:
        return (TokenOrigin.PLAIN,)
    full = verdict.num_accepted == num_draft_tokens
    last = TokenOrigin.BONUS if full else TokenOrigin.RECOVERED
    return (*([TokenOrigin.ACCEPTED] * verdict.num_accepted), last)


@dataclass(slots=True)
class ProposerCounts:
    """What one proposer did for one request."""

    num_spec_steps: int = 0
    """Rounds that verified at least one of its draft tokens."""
    num_draft_tokens: int = 0
    """Its draft tokens that were verified."""
    num_accepted_draft_tokens: int = 0
    """Its draft tokens that were accepted and emitted."""


@dataclass(slots=True)
class Record:
    """Counters of one request."""

    num_spec_steps: int = 0
    """Rounds that verified at least one draft token."""
    num_plain_steps: int = 0
    num_draft_tokens: int = 0
    """Draft tokens verified."""
    num_accepted_draft_tokens: int = 0
    """Draft tokens accepted and emitted."""
    num_recovered_tokens: int = 0
    num_bonus_tokens: int = 0
    num_plain_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_proposer: list[ProposerName] = field(default_factory=list)
    proposers: dict[ProposerName, ProposerCounts] = field(default_factory=dict)
    """What each proposer whose draft tokens were verified did; they add up to the sums above."""
    rounds_by_reason: Counter[Reason] = field(default_factory=Counter)
    """Rounds by why they had their K; each token of decode-ahead is a round."""
    rounds_by_k: Counter[int] = field(default_factory=Counter)
    """Rounds by the K they asked for."""
    draft_s: float = 0.0
    verify_s: float = 0.0

    def add_choice(self, num_speculative_tokens: int, reason: Reason) -> None:
        """Count what a round asked for, and why."""
        self.rounds_by_reason[reason] += 1
        self.rounds_by_k[num_speculative_tokens] += 1

    def add(
        self,
        num_draft_tokens: int,
        origins: tuple[TokenOrigin, ...],
        proposer: ProposerName | None,
    ) -> None:
        """Count one round.

        Args:
            num_draft_tokens: draft tokens verified.
            origins: of the tokens that were emitted; a trimmed round has fewer than it committed.
            proposer: who made the draft tokens, if there were any.
        """
        accepted = 0
        for origin in origins:
            match origin:
                case TokenOrigin.ACCEPTED:
                    if accepted == len(self.accepted_per_position):
                        self.accepted_per_position.append(0)
                    self.accepted_per_position[accepted] += 1
                    accepted += 1
                case TokenOrigin.RECOVERED:
                    self.num_recovered_tokens += 1
                case TokenOrigin.BONUS:
                    self.num_bonus_tokens += 1
                case TokenOrigin.PLAIN:
                    self.num_plain_tokens += 1
        self.num_accepted_draft_tokens += accepted
        if num_draft_tokens and proposer is not None:
            counts = self.proposers.setdefault(proposer, ProposerCounts())
            counts.num_spec_steps += 1
            counts.num_draft_tokens += num_draft_tokens
            counts.num_accepted_draft_tokens += accepted
            self.per_step_proposer.append(proposer)
            self.num_spec_steps += 1
            self.num_draft_tokens += num_draft_tokens
            self.per_step_drafted.append(num_draft_tokens)
            self.per_step_accepted.append(accepted)
        else:
            self.num_plain_steps += 1
