"""Records of tokens whose orchestrator was lost, or whose choice was given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specserve.gateway.blocks import Round, TokenOrigin
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.rounds import merge_records, record_of
from specserve.rpc.v1 import generation_pb2
from specserve.rpc.v1.generation_pb2 import SpeculationRecord
from unit.gateway.fakes import Exchange, FakeBackend, block, make_app

A: TokenOrigin = "accepted"
R: TokenOrigin = "recovered"
B: TokenOrigin = "bonus"
P: TokenOrigin = "plain"
NGRAM = generation_pb2.SPECULATIVE_METHOD_NGRAM
SUFFIX = generation_pb2.SPECULATIVE_METHOD_SUFFIX
NOBODY = generation_pb2.SPECULATIVE_METHOD_UNSPECIFIED
NONE = Round(0, NOBODY)


@pytest.mark.parametrize(
    ("origins", "drafted", "per_step_accepted", "per_position"),
    [
        ([], [], [], []),
        ([P, P], [0, 0], [], []),
        ([P, A, A, A, A, B], [0, 4], [4], [1, 1, 1, 1]),
        ([A, A, R, R, A, B], [4, 3, 1], [2, 0, 1], [2, 1]),
        ([A, A], [5], [2], [1, 1]),
        ([A, "unknown"], [1], [1], [1]),
        ([A, B], [1, 4], [1, 0], [1]),
    ],
)
def test_rounds_are_read_back_from_what_was_streamed(
    origins: list[TokenOrigin],
    drafted: list[int],
    per_step_accepted: list[int],
    per_position: list[int],
) -> None:
    """Each ends with a token that is no accepted one; a trimmed last one may lack it, or all."""
    record = record_of(origins, [Round(count, NGRAM if count else NOBODY) for count in drafted])

    assert record.per_step_drafted == [count for count in drafted if count]
    assert record.per_step_accepted == per_step_accepted
    assert record.accepted_per_position == per_position
    assert record.num_spec_steps == len(per_step_accepted)
    assert record.num_draft_tokens == sum(drafted)
    assert record.num_plain_steps == origins.count(P)
    assert tokens_of(record) == len(origins)
    assert sum(counts.num_draft_tokens for counts in record.proposers) == record.num_draft_tokens


def test_draft_tokens_are_counted_to_whoever_made_them() -> None:
    record = record_of(
        [A, R, A, B, P, R], [Round(4, SUFFIX), Round(1, NGRAM), NONE, Round(2, SUFFIX)]
    )

    assert record.per_step_proposer == [SUFFIX, NGRAM, SUFFIX]
    assert [
        (counts.proposer, counts.num_spec_steps, counts.num_draft_tokens)
        for counts in record.proposers
    ] == [(SUFFIX, 2, 6), (NGRAM, 1, 1)]
    assert [counts.num_accepted_draft_tokens for counts in record.proposers] == [1, 1]


def test_an_orchestrator_that_tells_no_rounds_is_counted_by_origins_alone() -> None:
    """As few draft tokens as there must have been: a rejected one, and those before it."""
    record = record_of([A, R, P, A, B], [])

    assert record.per_step_drafted == [2, 1]
    assert (record.num_plain_steps, tokens_of(record)) == (1, 5)


def test_records_of_two_parts_add_up() -> None:
    """Counts, positions and steps; what is cached is known by both or not at all."""
    first = record_of([P, A, R], [NONE, Round(4, SUFFIX)])
    second = SpeculationRecord(
        num_spec_steps=1,
        num_plain_steps=2,
        num_draft_tokens=4,
        num_accepted_draft_tokens=3,
        num_recovered_tokens=1,
        num_plain_tokens=2,
        num_late_proposals=5,
        accepted_per_position=[1, 1, 1],
        cached_prompt_tokens=64,
        num_speculative_tokens=4,
        draft_s=0.5,
        per_step_drafted=[4],
        per_step_accepted=[3],
        per_step_proposer=[generation_pb2.SPECULATIVE_METHOD_NGRAM],
    )
    second.proposers.add(proposer=generation_pb2.SPECULATIVE_METHOD_NGRAM, num_draft_tokens=4)
    merged = merge_records(first, second)

    assert tokens_of(merged) == 3 + 6
    assert (merged.num_spec_steps, merged.num_plain_steps) == (2, 3)
    assert merged.num_draft_tokens == 8
    assert merged.accepted_per_position == [2, 1, 1]
    assert (merged.per_step_drafted, merged.per_step_accepted) == ([4, 4], [1, 3])
    assert len(merged.per_step_proposer) == 2
    assert sum(counts.num_draft_tokens for counts in merged.proposers) == 8
    assert (merged.num_late_proposals, merged.draft_s) == (5, 0.5)
    assert merged.num_speculative_tokens == 4
    assert merged.cached_prompt_tokens == 0


async def test_tokens_of_a_choice_that_is_given_up_are_counted_by_origin() -> None:
    """Emitted tokens and tokens by origin add up, however a request ends."""
    origins = [generation_pb2.TOKEN_ORIGIN_ACCEPTED, generation_pb2.TOKEN_ORIGIN_RECOVERED]
    rounds = {"per_round_drafted": [4], "per_round_proposer": [NGRAM]}
    backend = FakeBackend(lambda _: [block(b"xy", origins=origins, **rounds), asyncio.Event()])
    metrics = GatewayMetrics()
    body: dict[str, Any] = {"prompt": "hi", "n": 2, "stream": True}
    exchange = Exchange(make_app(backend, metrics), "/v1/completions", body)
    exchange.read_all()
    task = exchange.start()
    await exchange.until(lambda: exchange.body.count(b"xy") == 2)
    exchange.disconnect()
    await task
    value = metrics.registry.get_sample_value

    assert value("specserve_generation_tokens_total") == 4
    assert value("specserve_spec_decode_num_accepted_tokens_total") == 2
    assert value("specserve_spec_decode_num_recovered_tokens_total") == 2
    assert value("specserve_spec_decode_num_drafts_total") == 2
    assert value("specserve_spec_decode_num_draft_tokens_total") == 8


def tokens_of(record: SpeculationRecord) -> int:
    """Add up a record's tokens."""
    return (
        record.num_accepted_draft_tokens
        + record.num_recovered_tokens
        + record.num_bonus_tokens
        + record.num_plain_tokens
    )
