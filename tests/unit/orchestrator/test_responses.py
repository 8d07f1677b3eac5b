"""A committed block on the wire: each token with its own log-probability."""

from __future__ import annotations

import numpy as np
import pytest

from specserve.orchestrator.decode import Committed
from specserve.orchestrator.record import Record, TokenOrigin, origins_of
from specserve.orchestrator.responses import add_steps, block_response, record_message
from specserve.orchestrator.trimming import Emission, FinishReason
from specserve.rpc import codec
from specserve.rpc.v1 import generation_pb2, target_pb2
from specserve.speculation.types import Verification

K = 4
DRAFT = np.array([-10, -11, -12, -13], "<f4")
REPLACEMENT = np.array([-20, -21, -22, -23, -24], "<f4")
TOP_IDS = np.arange(10, dtype="<i4").reshape(5, 2)
TOP = -np.arange(10, dtype="<f4").reshape(5, 2)


def rows(num_top: int = 2) -> target_pb2.RowLogprobs:
    """Make the target's rows: recognisable numbers for every row."""
    return target_pb2.RowLogprobs(
        draft=DRAFT.tobytes(),
        replacement=REPLACEMENT.tobytes(),
        num_top=num_top,
        top_token_ids=TOP_IDS.tobytes() if num_top else b"",
        top=TOP.tobytes() if num_top else b"",
    )


def committed(
    num_accepted: int,
    num_emitted: int | None = None,
    logprobs: target_pb2.RowLogprobs | None = None,
) -> Committed:
    """Make a round of K draft tokens, of which some were accepted and some emitted."""
    count = num_accepted + 1 if num_emitted is None else num_emitted
    verdict = Verification(num_accepted, 9)
    return Committed(
        tuple(range(1, num_accepted + 1))[:count] + (9,) * (count > num_accepted),
        Emission(count, b"text", None, None),
        origins_of(K, verdict)[:count],
        K,
        "suffix",
        num_accepted,
        logprobs,
    )


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 4])
def test_row_of_each_token_is_its_own_B055_B056(num_accepted: int) -> None:
    """Accepted tokens take the draft column, the last one the replacement of its own row."""
    response = block_response(committed(num_accepted, logprobs=rows()), origins=False)
    assert [entry.logprob for entry in response.logprobs] == [
        *DRAFT[:num_accepted].tolist(),
        float(REPLACEMENT[num_accepted]),
    ]
    for row, entry in enumerate(response.logprobs):
        assert codec.unpack_ids(entry.top_token_ids, "top") == tuple(TOP_IDS[row].tolist())
        assert np.frombuffer(entry.top_logprobs, "<f4").tolist() == TOP[row].tolist()
    assert not response.origins


@pytest.mark.parametrize(("num_accepted", "num_emitted"), [(4, 2), (4, 1), (2, 2), (0, 1)])
def test_trimmed_block_carries_as_many_logprobs_as_tokens_B044(
    num_accepted: int, num_emitted: int
) -> None:
    """Ids, logprobs and origins end at the same place."""
    response = block_response(committed(num_accepted, num_emitted, rows()), origins=True)
    ids = codec.unpack_ids(response.token_ids, "token_ids")
    assert len(ids) == len(response.logprobs) == len(response.origins) == num_emitted


def test_chosen_token_only_has_no_top_list_B055() -> None:
    """num_logprobs 0: one entry per token, nothing beside it."""
    response = block_response(committed(2, logprobs=rows(num_top=0)), origins=False)
    assert len(response.logprobs) == 3
    assert all(entry.top_token_ids == b"" == entry.top_logprobs for entry in response.logprobs)


def test_no_logprobs_unless_asked_for() -> None:
    """The default costs nothing."""
    assert not block_response(committed(2), origins=False).logprobs


def test_origins_are_named_one_by_one() -> None:
    """accepted, accepted, recovered."""
    response = block_response(committed(2), origins=True)
    assert list(response.origins) == [
        generation_pb2.TOKEN_ORIGIN_ACCEPTED,
        generation_pb2.TOKEN_ORIGIN_ACCEPTED,
        generation_pb2.TOKEN_ORIGIN_RECOVERED,
    ]


def test_what_a_round_drafted_travels_with_its_tokens() -> None:
    """The whole draft, though fewer tokens were accepted and emitted; nobody for a plain round."""
    drafted = block_response(committed(2, 1), origins=True)
    nothing = Committed(
        (9,), Emission(1, b"x", None, None), (TokenOrigin.PLAIN,), 0, "suffix", 0, None
    )
    plain = block_response(nothing, origins=True)
    silent = block_response(committed(2), origins=False)
    assert list(drafted.per_round_drafted) == [K]
    assert list(drafted.per_round_proposer) == [generation_pb2.SPECULATIVE_METHOD_SUFFIX]
    assert list(plain.per_round_drafted) == [0]
    assert list(plain.per_round_proposer) == [generation_pb2.SPECULATIVE_METHOD_UNSPECIFIED]
    assert not silent.per_round_drafted
    assert not silent.per_round_proposer


@pytest.mark.parametrize(
    ("reason", "stop_index", "number", "plus_one"),
    [
        (None, None, generation_pb2.FINISH_REASON_UNSPECIFIED, 0),
        (FinishReason.LENGTH, None, generation_pb2.FINISH_REASON_LENGTH, 0),
        (FinishReason.STOP, None, generation_pb2.FINISH_REASON_STOP, 0),
        (FinishReason.STOP, 0, generation_pb2.FINISH_REASON_STOP, 1),
        (FinishReason.STOP, 3, generation_pb2.FINISH_REASON_STOP, 4),
    ],
)
def test_reason_and_stop_travel(
    reason: FinishReason | None, stop_index: int | None, number: int, plus_one: int
) -> None:
    """The first stop string is told from none."""
    block = Committed((), Emission(0, b"", reason, stop_index), (), 0, None, 0, None)
    response = block_response(block, origins=True)
    assert (response.finish_reason, response.stop_index_plus_one) == (number, plus_one)


def test_record_travels_with_its_steps_only_when_asked() -> None:
    """Per-step lists grow with the text; counters do not."""
    record = Record()
    for accepted in (4, 0, 2):
        record.add(K, origins_of(K, Verification(accepted, 9)), "suffix")
    record.add(0, origins_of(0, Verification(0, 9)), None)
    record.draft_s, record.verify_s = 0.5, 1.5
    short, full = record_message(record), record_message(record)
    add_steps(full, record)
    for message in (short, full):
        assert (message.num_spec_steps, message.num_plain_steps) == (3, 1)
        assert (message.num_draft_tokens, message.num_accepted_draft_tokens) == (12, 6)
        assert (message.num_recovered_tokens, message.num_bonus_tokens) == (2, 1)
        assert message.num_plain_tokens == 1
        assert list(message.accepted_per_position) == [2, 2, 1, 1]
        assert (message.draft_s, message.verify_s) == (0.5, 1.5)
        (counts,) = message.proposers
        assert counts.proposer == generation_pb2.SPECULATIVE_METHOD_SUFFIX
        assert (counts.num_spec_steps, counts.num_draft_tokens) == (3, 12)
        assert counts.num_accepted_draft_tokens == 6
    assert list(short.per_step_drafted) == []
    assert list(full.per_step_accepted) == [4, 0, 2]
    assert list(short.per_step_proposer) == []
    assert list(full.per_step_proposer) == [generation_pb2.SPECULATIVE_METHOD_SUFFIX] * 3
