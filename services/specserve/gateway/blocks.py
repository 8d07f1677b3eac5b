"""One committed block of one choice, as the gateway's parts hand it on. Values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from specserve.rpc.v1 import generation_pb2
from specserve.rpc.v1.generation_pb2 import (
    BlockProvenance,
    GenerateResponse,
    SpeculationRecord,
    SpeculativeMethod,
)

FinishReason = Literal["stop", "length"]
TokenOrigin = Literal["accepted", "recovered", "bonus", "plain", "unknown"]

_ORIGINS: dict[int, TokenOrigin] = {
    generation_pb2.TOKEN_ORIGIN_ACCEPTED: "accepted",
    generation_pb2.TOKEN_ORIGIN_RECOVERED: "recovered",
    generation_pb2.TOKEN_ORIGIN_BONUS: "bonus",
    generation_pb2.TOKEN_ORIGIN_PLAIN: "plain",
}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's view of one emitted token, or one of the prompt."""

    logprob: float
    """Natural logarithm, of the unmodified target distribution."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""


@dataclass(frozen=True, slots=True)
class Round:
    """What was drafted for one round."""

    num_draft_tokens: int
    """Draft tokens verified."""
    proposer: SpeculativeMethod
    """Who drafted; unspecified where nothing was."""


@dataclass(frozen=True, slots=True)
class Block:
    """One committed block of one choice."""

    index: int
    """Number of the choice in the body."""
    text: str
    """Characters that are now complete; may lag behind the tokens."""
    token_ids: tuple[int, ...]
    """Emitted tokens."""
    logprobs: tuple[TokenLogprobs, ...]
    """One per token, if asked for."""
    origins: tuple[TokenOrigin, ...]
    """One per token, if asked for."""
    rounds: tuple[Round, ...]
    """The rounds that made the tokens, if asked for."""
    provenance: tuple[BlockProvenance, ...]
    """Where the tokens of each of these rounds came from, if asked for."""
    finish_reason: FinishReason | None
    """Set on the choice's last block only."""
    record: SpeculationRecord | None
    """Set on the choice's last block only."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's next tokens, from its second one on, if asked for."""


def unpack_rounds(response: GenerateResponse) -> tuple[Round, ...]:
    """Read what was drafted for a response's tokens."""
    told = zip(response.per_round_drafted, response.per_round_proposer, strict=False)
    return tuple(Round(num_draft_tokens, proposer) for num_draft_tokens, proposer in told)


def unpack_origins(numbers: Iterable[int]) -> tuple[TokenOrigin, ...]:
    """Read where tokens came from; an orchestrator of a newer build may have other origins."""
    return tuple(_ORIGINS.get(number, "unknown") for number in numbers)
