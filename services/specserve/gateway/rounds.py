"""What speculation did for tokens whose own record never came.

An orchestrator sends its record with a choice's last block. When it is lost before that, or the
choice is given up, what was streamed beside the tokens still tells its rounds: where each token
came from, a round ending with one that is no accepted draft token, and what was drafted for each.
Pure counting; knows no stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from specserve.gateway.blocks import Round, TokenOrigin
from specserve.rpc.v1.generation_pb2 import (
    ProposerCounts,
    SpeculationRecord,
    SpeculativeMethod,
)

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
    "num_failovers",
    "draft_s",
    "verify_s",
)
_IN_ORDER = ("per_step_drafted", "per_step_accepted", "per_step_proposer", "proposers")
"""A proposer may be named twice: whoever reads the counts adds them up."""

_UNKNOWN = SpeculativeMethod.SPECULATIVE_METHOD_UNSPECIFIED


def record_of(origins: Sequence[TokenOrigin], rounds: Sequence[Round]) -> SpeculationRecord:
    """Count whole rounds of streamed tokens.

    Late proposals, reopened targets and the seconds waited are not streamed and stay 0.

    Args:
        rounds: what was drafted for each round; an orchestrator of an older build tells none, and
            then no more draft tokens are counted than the origins show.
    """
    record = SpeculationRecord()
    per_position: list[int] = []
    proposers: dict[int, ProposerCounts] = {}
    for emitted, told in zip_longest(_rounds(origins), rounds):
        accepted, last = emitted or (0, None)
        if last == "recovered":
            record.num_recovered_tokens += 1
        elif last == "bonus":
            record.num_bonus_tokens += 1
        elif last is not None:
            record.num_plain_tokens += 1
        told = told or Round(accepted + (last == "recovered"), _UNKNOWN)
        drafted = told.num_draft_tokens
        if drafted == 0:
            record.num_plain_steps += 1
            continue
        record.num_spec_steps += 1
        record.num_draft_tokens += drafted
        record.num_accepted_draft_tokens += accepted
        record.per_step_drafted.append(drafted)
        record.per_step_accepted.append(accepted)
        record.per_step_proposer.append(told.proposer)
        counts = proposers.setdefault(told.proposer, ProposerCounts(proposer=told.proposer))
        counts.num_spec_steps += 1
        counts.num_draft_tokens += drafted
        counts.num_accepted_draft_tokens += accepted
        per_position += [0] * (accepted - len(per_position))
        for position in range(accepted):
            per_position[position] += 1
    record.accepted_per_position.extend(per_position)
    record.proposers.extend(proposers.values())
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
