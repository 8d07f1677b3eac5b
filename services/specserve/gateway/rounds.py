"""What speculation did for tokens whose own record never came.

An orchestrator sends its record with a choice's last block. When it is lost before that, or the
choice is given up, the origins of the streamed tokens still tell its rounds: each ends with one
token that is not an accepted draft token. Pure counting; knows no stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specserve.gateway.blocks import TokenOrigin
from specserve.rpc.v1.generation_pb2 import SpeculationRecord, SpeculativeMethod

_SUMS = (
    "num_spec_steps",
    "num_plain_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_recovered_tokens",
    "num_bonus_tokens",
    "num_plain_tokens",
    "num_late_proposals",
    "num_target_reopens",
    "draft_s",
    "verify_s",
)
_IN_ORDER = ("per_step_drafted", "per_step_accepted", "per_step_proposer", "proposers")
"""A proposer may be named twice: whoever reads the counts adds them up."""

_UNKNOWN = SpeculativeMethod.SPECULATIVE_METHOD_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Asked:
    """What bounded the drafts of a choice."""

    num_speculative_tokens: int
    """K asked for."""
    max_tokens: int
    """Most output tokens."""
    num_output_tokens: int = 0
    """Tokens committed before the first one counted."""


def record_of(origins: Sequence[TokenOrigin], asked: Asked) -> SpeculationRecord:
    """Count whole rounds of streamed tokens.

    Exact, but for one number: how many draft tokens followed the rejected one in a round that ended
    with a recovered token is not streamed. The round is taken to have drawn what the orchestrator
    plans, K or what max_tokens left room for; a proposer that gave fewer is counted too high.
    Who proposed is not streamed either. Late proposals, reopened targets and the seconds waited are
    unknown and stay 0.
    """
    record = SpeculationRecord(num_speculative_tokens=asked.num_speculative_tokens)
    per_position: list[int] = []
    num_before = asked.num_output_tokens
    for accepted, last in _rounds(origins):
        drafted = accepted
        if last == "recovered":
            room = asked.max_tokens - num_before - 1
            drafted = max(accepted + 1, min(asked.num_speculative_tokens, room))
            record.num_recovered_tokens += 1
        elif last == "bonus":
            record.num_bonus_tokens += 1
        elif last is not None:
            record.num_plain_tokens += 1
        num_before += accepted + (last is not None)
        if drafted == 0:
            record.num_plain_steps += 1
            continue
        record.num_spec_steps += 1
        record.num_draft_tokens += drafted
        record.num_accepted_draft_tokens += accepted
        record.per_step_drafted.append(drafted)
        record.per_step_accepted.append(accepted)
        per_position += [0] * (accepted - len(per_position))
        for position in range(accepted):
            per_position[position] += 1
    record.accepted_per_position.extend(per_position)
    if record.num_spec_steps:
        record.per_step_proposer.extend([_UNKNOWN] * record.num_spec_steps)
        record.proposers.add(
            proposer=_UNKNOWN,
            num_spec_steps=record.num_spec_steps,
            num_draft_tokens=record.num_draft_tokens,
            num_accepted_draft_tokens=record.num_accepted_draft_tokens,
        )
    return record


def merge_records(first: SpeculationRecord, second: SpeculationRecord) -> SpeculationRecord:
    """Add up the records of two parts of one choice, the second of which ended it.

    Prompt tokens count as cached when both parts found them so: the second finds in the prefix
    cache what the first has just computed.
    """
    merged = SpeculationRecord()
    merged.CopyFrom(second)
    for name in _SUMS:
        setattr(merged, name, getattr(first, name) + getattr(second, name))
    merged.cached_prompt_tokens = min(first.cached_prompt_tokens, second.cached_prompt_tokens)
    for name in _IN_ORDER:
        merged.ClearField(name)
        getattr(merged, name).extend([*getattr(first, name), *getattr(second, name)])
    width = max(len(first.accepted_per_position), len(second.accepted_per_position))
    merged.ClearField("accepted_per_position")
    merged.accepted_per_position.extend(
        sum(r.accepted_per_position[i] for r in (first, second) if i < len(r.accepted_per_position))
        for i in range(width)
    )
    return merged


def _rounds(origins: Sequence[TokenOrigin]) -> Iterator[tuple[int, TokenOrigin | None]]:
    """Yield (accepted draft tokens, the round's last token); None where a round was trimmed."""
    accepted = 0
    for origin in origins:
        if origin == "accepted":
            accepted += 1
        else:
            yield accepted, origin
            accepted = 0
    if accepted:
        yield accepted, None
