"""The proposer of one request, as the round sees it: asked for K tokens, told what was committed.

A guess may depend on committed tokens and clocks alone; with that, any guess keeps the target's
law. Trouble of any sort is a round without draft tokens, never an error. Knows no proposer.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from specserve.orchestrator.pool import DraftLink
from specserve.rpc.v1 import common_pb2
from specserve.speculation.types import Proposal

EMPTY_PROPOSAL = Proposal((), None)


ProposerName = Literal["draft_model", "ngram", "suffix"]
"""Who makes a proposal; also a metric's label, so the set is fixed."""


class Drafted(NamedTuple):
    """What a round got from its proposer."""

    proposal: Proposal
    token_probs: tuple[float, ...] | None
    """[K] q of each draft token; None where the rule needs none."""
    timing: common_pb2.CallTiming | None
    """None when nothing came, and for a proposer without a service."""
    wait_s: float
    proposer: ProposerName | None
    """Where the draft tokens came from; None when nobody was asked."""


NOTHING_DRAFTED = Drafted(EMPTY_PROPOSAL, None, None, 0.0, None)


class Proposer(Protocol):
    """The draft side of one request. One call at a time; `close` ends it."""

    @property
    def num_late(self) -> int:
        """Proposals that missed their round."""
        ...

    @property
    def num_invalid(self) -> int:
        """Proposals that contradicted themselves and were not used."""
        ...

    @property
    def link(self) -> DraftLink | None:
        """The draft replica in use; None while there is none, or for a proposer without one."""
        ...

    @property
    def is_busy(self) -> bool:
        """Something it was asked, or given to take in, is still under way."""
        ...

    @property
    def catch_up_s(self) -> float:
        """Seconds of a device that the last catching up took."""
        ...

    @property
    def num_behind(self) -> int:
        """Committed tokens that it lacks and that would make a proposal slow; 0 if none would."""
        ...

    @property
    def num_steps_without(self) -> int:
        """Tokens to decode ahead in a round without a proposal, before it is asked again."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence it takes, in tokens; 0 means no limit."""
        ...

    def ready(self) -> bool:
        """Say whether it can be asked now; False means target-only for this round."""
        ...

    def catch_up(self, traceparent: str) -> bool:
        """Begin to take in what is committed, without waiting; True when it may be asked next."""
        ...

    async def caught_up(self, timeout_s: float) -> None:
        """Wait until what it was given is taken in, at most so long."""
        ...

    async def propose(self, num_speculative_tokens: int, traceparent: str) -> Drafted:
        """Guess at most `num_speculative_tokens` >= 1 tokens; fewer, or none, are fine."""
        ...

    def settle(self) -> None:
        """Take in what a round has committed."""
        ...

    def rest(self) -> None:
        """Free what it holds of a device until it is wanted again. Idempotent."""
        ...

    def close(self) -> None:
        """Free what it holds for the request. Idempotent."""
        ...
