"""What speculation did for one request, counted over emitted tokens only. Knows numbers alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

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
    draft_s: float = 0.0
    verify_s: float = 0.0

    def add(self, num_draft_tokens: int, origins: tuple[TokenOrigin, ...]) -> None:
        """Count one round.

        Args:
            num_draft_tokens: draft tokens verified.
            origins: of the tokens that were emitted; a trimmed round has fewer than it committed.
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
        if num_draft_tokens:
            self.num_spec_steps += 1
            self.num_draft_tokens += num_draft_tokens
            self.per_step_drafted.append(num_draft_tokens)
            self.per_step_accepted.append(accepted)
        else:
            self.num_plain_steps += 1
