"""Committed blocks and records as GenerateResponse. Knows protobuf; decides nothing."""

from __future__ import annotations

import numpy as np

from specserve.orchestrator.decode import Committed
from specserve.orchestrator.record import Record, TokenOrigin
from specserve.orchestrator.trimming import FinishReason
from specserve.rpc import codec
from specserve.rpc.v1 import generation_pb2, target_pb2

_ORIGINS = {
    TokenOrigin.ACCEPTED: generation_pb2.TOKEN_ORIGIN_ACCEPTED,
    TokenOrigin.RECOVERED: generation_pb2.TOKEN_ORIGIN_RECOVERED,
    TokenOrigin.BONUS: generation_pb2.TOKEN_ORIGIN_BONUS,
    TokenOrigin.PLAIN: generation_pb2.TOKEN_ORIGIN_PLAIN,
}

_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


def block_response(
    committed: Committed, *, origins: bool, provenance: bool = False
) -> generation_pb2.GenerateResponse:
    """Write one committed block."""
    emission = committed.emission
    response = generation_pb2.GenerateResponse(
        token_ids=codec.pack_ids(committed.token_ids), text=emission.text
    )
    if committed.logprobs is not None:
        response.logprobs.extend(
            token_logprobs(committed.logprobs, committed.num_accepted, len(committed.token_ids))
        )
    if origins:
        response.origins.extend(_ORIGINS[origin] for origin in committed.origins)
        proposer = committed.proposer if committed.num_draft_tokens else None
        response.per_round_drafted.append(committed.num_draft_tokens)
        response.per_round_proposer.append(codec.pack_method(proposer))
    if provenance and committed.provenance is not None:
        response.provenance.append(committed.provenance.message(len(committed.token_ids)))
    if emission.finish_reason is not None:
        response.finish_reason = _REASONS[emission.finish_reason]
        if emission.stop_index is not None:
            response.stop_index_plus_one = emission.stop_index + 1
    return response


def token_logprobs(
    rows: target_pb2.RowLogprobs, num_drafted: int, num_rows: int
) -> list[generation_pb2.TokenLogprob]:
    """Read the first rows of an answer: the draft token's of `num_drafted`, then replacements'."""
    draft = np.frombuffer(rows.draft, "<f4")
    replacement = np.frombuffer(rows.replacement, "<f4")
    top_ids = np.frombuffer(rows.top_token_ids, "<i4").reshape(len(replacement), rows.num_top)
    top = np.frombuffer(rows.top, "<f4").reshape(len(replacement), rows.num_top)
    return [
        generation_pb2.TokenLogprob(
            logprob=float(draft[row] if row < num_drafted else replacement[row]),
            top_token_ids=top_ids[row].tobytes(),
            top_logprobs=top[row].tobytes(),
        )
        for row in range(num_rows)
    ]


def nothing_decoded(num_speculative_tokens: int) -> generation_pb2.GenerateResponse:
    """Write the end of a choice that wants no output token."""
    return generation_pb2.GenerateResponse(
        finish_reason=generation_pb2.FINISH_REASON_LENGTH,
        record=generation_pb2.SpeculationRecord(num_speculative_tokens=num_speculative_tokens),
    )


def record_message(record: Record) -> generation_pb2.SpeculationRecord:
    """Write what speculation did for a choice, as sums."""
    return generation_pb2.SpeculationRecord(
        num_spec_steps=record.num_spec_steps,
        num_plain_steps=record.num_plain_steps,
        num_draft_tokens=record.num_draft_tokens,
        num_accepted_draft_tokens=record.num_accepted_draft_tokens,
        num_recovered_tokens=record.num_recovered_tokens,
        num_bonus_tokens=record.num_bonus_tokens,
        num_plain_tokens=record.num_plain_tokens,
        accepted_per_position=record.accepted_per_position,
        draft_s=record.draft_s,
        verify_s=record.verify_s,
        proposers=[
            generation_pb2.ProposerCounts(
                proposer=codec.pack_method(name),
                num_spec_steps=counts.num_spec_steps,
                num_draft_tokens=counts.num_draft_tokens,
                num_accepted_draft_tokens=counts.num_accepted_draft_tokens,
            )
            for name, counts in record.proposers.items()
        ],
    )


def add_steps(message: generation_pb2.SpeculationRecord, record: Record) -> None:
    """Add what each of its rounds did."""
    message.per_step_drafted.extend(record.per_step_drafted)
    message.per_step_accepted.extend(record.per_step_accepted)
    message.per_step_proposer.extend(codec.pack_method(name) for name in record.per_step_proposer)
