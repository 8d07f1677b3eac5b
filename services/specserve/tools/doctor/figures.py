"""What recorded rounds say of speculation's speed: acceptance, each stage's seconds, target-only.

Pure sums over the rounds after a request's first one, which is its prompt's. Knows records; asks
nobody and judges nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from specserve.rpc.request_view import RequestView, RoundView, StageSeconds, add_stages


class Basis(StrEnum):
    """Where the time of a target-only token was taken from, the best first."""

    REQUESTS = "requests without speculation"
    ROUNDS = "rounds without a draft"
    VERIFICATION = "a verification, as no round was without a draft"
    """At least what a target-only token takes: its forward has fewer rows."""


@dataclass(frozen=True, slots=True)
class TargetOnly:
    """What a token costs without a draft."""

    token_s: float
    """Wall time."""
    forward_s: float
    """Of it, in the forward."""
    basis: Basis


@dataclass(frozen=True, slots=True)
class Figures:
    """Rounds of requests that speculated, and what a token costs without."""

    num_requests: int
    num_rounds: int
    """Rounds that verified draft tokens."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_rejections: int
    """Rounds that ended with a rejected draft token."""
    num_emitted_tokens: int
    """By rounds with draft tokens."""
    num_tokens: int
    """By all rounds."""
    drafted: StageSeconds
    """Of rounds with draft tokens, all together."""
    stages: StageSeconds
    """Of all rounds."""
    reasons: dict[str, int]
    """{why: rounds without draft tokens}"""
    lost: dict[str, int]
    """{replica and error: calls}"""
    target_only: TargetOnly

    @property
    def k(self) -> float:
        """Draft tokens a round."""
        return self.num_draft_tokens / self.num_rounds

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens accepted, of those that were looked at."""
        looked_at = self.num_accepted_tokens + self.num_rejections
        return self.num_accepted_tokens / looked_at if looked_at else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens a round with drafts emits."""
        return self.num_emitted_tokens / self.num_rounds

    @property
    def draft_cost(self) -> float:
        """c: seconds a draft token was waited for, over those of the target's forward."""
        forward_s = self.target_only.forward_s
        return self.drafted.draft_forward_s / self.num_draft_tokens / forward_s if forward_s else 0

    @property
    def token_s(self) -> float:
        """Wall time of a token, rounds without draft tokens included."""
        return self.stages.total_s / self.num_tokens

    @property
    def speedup(self) -> float:
        """Times as fast as target-only."""
        return self.target_only.token_s / self.token_s

    def speedup_in(self, total_s: float) -> float:
        """Return the speedup if all rounds had taken so long together."""
        return self.target_only.token_s * self.num_tokens / total_s if total_s > 0 else 0.0


def figures_of(views: Sequence[RequestView]) -> Figures | None:
    """Add up; None where no round verified a draft token."""
    speculating = [view for view in views if view.num_draft_tokens and view.rounds]
    rounds = [one for view in speculating for one in view.rounds[1:] if one.num_emitted_tokens]
    drafted = [one for one in rounds if one.num_draft_tokens]
    if not drafted:
        return None
    plain = [one for one in rounds if not one.num_draft_tokens]
    calls = [call for view in speculating for one in view.rounds[1:] for call in one.calls]
    return Figures(
        num_requests=len(speculating),
        num_rounds=len(drafted),
        num_draft_tokens=sum(one.num_draft_tokens for one in drafted),
        num_accepted_tokens=sum(one.num_accepted_tokens for one in drafted),
        num_rejections=sum(one.first_rejection is not None for one in drafted),
        num_emitted_tokens=sum(one.num_emitted_tokens for one in drafted),
        num_tokens=sum(one.num_emitted_tokens for one in rounds),
        drafted=add_stages([one.stages for one in drafted]),
        stages=add_stages([one.stages for one in rounds]),
        reasons=dict(Counter(one.reason for one in plain).most_common()),
        lost=dict(Counter(f"{c.replica_id}: {c.error}" for c in calls if c.error).most_common()),
        target_only=_target_only(views, plain, drafted),
    )


def reasons_without(views: Iterable[RequestView]) -> dict[str, int]:
    """Say why rounds had no draft tokens: {reason: rounds}, the prompts' own rounds left out."""
    rounds = (one for view in views for one in view.rounds[1:] if not one.num_draft_tokens)
    return dict(Counter(one.reason for one in rounds).most_common())


def _target_only(
    views: Sequence[RequestView], plain: Sequence[RoundView], drafted: Sequence[RoundView]
) -> TargetOnly:
    without = list(_rounds_without(views))
    for rounds, basis in ((without, Basis.REQUESTS), (plain, Basis.ROUNDS)):
        sound = [one for one in rounds if not any(call.error for call in one.calls)]
        if tokens := sum(one.num_emitted_tokens for one in sound):
            stages = add_stages([one.stages for one in sound])
            draft_s = stages.draft_queue_s + stages.draft_forward_s + stages.draft_transport_s
            own_s = stages.total_s - draft_s
            return TargetOnly(own_s / tokens, stages.verify_forward_s / tokens, basis)
    stages = add_stages([one.stages for one in drafted])
    own_s = stages.verify_forward_s + stages.verify_transport_s + stages.commit_s
    forward_s = stages.verify_forward_s / len(drafted)
    return TargetOnly(own_s / len(drafted), forward_s, Basis.VERIFICATION)


def _rounds_without(views: Sequence[RequestView]) -> Iterator[RoundView]:
    for view in views:
        if not view.num_draft_tokens and (view.method is None or not view.num_speculative_tokens):
            yield from (one for one in view.rounds[1:] if one.num_emitted_tokens)
