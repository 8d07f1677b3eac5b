"""Records of tokens whose orchestrator was lost, or whose choice was given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specserve.gateway.blocks import TokenOrigin
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.rounds import Asked, merge_records, record_of
from specserve.rpc.v1 import generation_pb2
from specserve.rpc.v1.generation_pb2 import SpeculationRecord
from unit.gateway.fakes import Exchange, FakeBackend, block, make_app

A: TokenOrigin = "accepted"
R: TokenOrigin = "recovered"
B: TokenOrigin = "bonus"
P: TokenOrigin = "plain"


@pytest.mark.parametrize(
    ("origins", "per_step_drafted", "per_step_accepted", "per_position"),
    [
        ([], [], [], []),
        ([P, P], [], [], []),
        ([P, A, A, A, A, B], [4], [4], [1, 1, 1, 1]),
        ([A, A, R, R, A, B], [4, 4, 1], [2, 0, 1], [2, 1]),
        ([A, A], [2], [2], [1, 1]),
        ([A, "unknown"], [1], [1], [1]),
    ],
)
def test_rounds_are_read_back_from_the_origins_of_their_tokens(
    origins: list[TokenOrigin],
    per_step_drafted: list[int],
    per_step_accepted: list[int],
    per_position: list[int],
) -> None:
    """Each ends with a token that is no accepted one; a trimmed last one may lack it."""
    record = record_of(origins, Asked(num_speculative_tokens=4, max_tokens=100))

    assert record.per_step_drafted == per_step_drafted
    assert record.per_step_accepted == per_step_accepted
    assert record.accepted_per_position == per_position
    assert record.num_spec_steps == len(per_step_drafted)
    assert record.num_draft_tokens == sum(per_step_drafted)
    assert record.num_plain_steps == origins.count(P)
    assert tokens_of(record) == len(origins)
    assert sum(counts.num_draft_tokens for counts in record.proposers) == record.num_draft_tokens


def test_no_round_drafted_more_than_there_was_room_for() -> None:
    """A proposal leaves the last place to the target's own token."""
    asked = Asked(num_speculative_tokens=4, max_tokens=10, num_output_tokens=3)
    record = record_of([A, R, A, R, R, P], asked)

    assert record.per_step_drafted == [4, 4, 2]


def test_records_of_two_parts_add_up() -> None:
    """Counts, positions and steps; what is cached is known by both or not at all."""
    first = record_of([P, A, R], Asked(4, 100))
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
    backend = FakeBackend(lambda _: [block(b"xy", origins=origins), asyncio.Event()])
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
