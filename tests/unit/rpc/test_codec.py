"""Numbers and values survive the wire; what does not fit is refused by the field's name."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from specserve.errors import InvalidProposal, InvalidRequest
from specserve.model.messages import CallTiming, EngineLoad, SessionOpening
from specserve.rpc import codec
from specserve.rpc.v1 import common_pb2
from specserve.speculation.types import AcceptanceRule, SamplingParams, SparseProbs

PARAMS = SamplingParams(
    rule=AcceptanceRule.STANDARD,
    seed=2**64 - 1,
    choice=2**32 - 1,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    stop_token_ids=(0, 7),
    num_logprobs=0,
)


@pytest.mark.parametrize("ids", [(), (0,), (1, -1, 2**31 - 1, -(2**31)), tuple(range(1000))])
def test_ids_survive(ids: tuple[int, ...]) -> None:
    """Every int32 comes back as it was, four bytes each, little-endian."""
    data = codec.pack_ids(ids)
    assert len(data) == 4 * len(ids)
    assert codec.unpack_ids(data, "ids") == ids
    assert codec.pack_ids((1,)) == b"\x01\0\0\0"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 4001])
def test_ids_of_a_broken_length_are_refused_by_name(size: int) -> None:
    """A length that is no multiple of 4 names the field and both numbers."""
    with pytest.raises(InvalidRequest, match=rf"^draft_token_ids: {size} bytes, a multiple of 4"):
        codec.unpack_ids(b"\0" * size, "draft_token_ids")


def test_arrays_are_little_endian_and_read_only() -> None:
    """An array shares the message's memory, so nobody may write to it."""
    array = codec.unpack_array(np.array([1.5, -2.0], "<f8").tobytes(), np.float64, "p")
    assert array.tolist() == [1.5, -2.0]
    assert not array.flags.writeable
    with pytest.raises(InvalidRequest, match="p: 12 bytes, a multiple of 8"):
        codec.unpack_array(b"\0" * 12, np.float64, "p")


def test_probs_survive() -> None:
    """q comes back with its shape, ids and float32 weights, bit for bit."""
    probs = SparseProbs(
        np.array([[3, 1, 0], [2, 5, 9]], np.int32),
        np.array([[0.1, 0.2, 0.0], [1e-38, 3e38, 7]], np.float32),
    )
    back = codec.unpack_probs(*codec.pack_probs(probs), num_rows=2)
    assert back is not None
    assert back.token_ids.tolist() == probs.token_ids.tolist()
    assert back.weights.tobytes() == probs.weights.tobytes()
    assert codec.unpack_probs(*codec.pack_probs(None), num_rows=2) is None


@pytest.mark.parametrize(
    ("support_size", "num_ids", "num_weights", "num_rows"),
    [(2, 4, 4, 3), (2, 3, 3, 2), (2, 4, 3, 2), (2**32 - 1, 4, 4, 2), (1, 0, 0, 1), (2, 4, 4, 0)],
)
def test_probs_of_another_shape_are_refused(
    support_size: int, num_ids: int, num_weights: int, num_rows: int
) -> None:
    """Ids, weights and rows must fit one [K, k]."""
    with pytest.raises(InvalidProposal, match="was wanted"):
        codec.unpack_probs(support_size, b"\0" * 4 * num_ids, b"\0" * 4 * num_weights, num_rows)


def test_sampling_survives() -> None:
    """Every field comes back, the 64-bit seed whole; 'none' and 'only the chosen one' differ."""
    assert codec.unpack_sampling(codec.pack_sampling(PARAMS)) == PARAMS
    for rule in AcceptanceRule:
        plain = SamplingParams(rule=rule, seed=0, choice=0)
        assert plain.num_logprobs == -1
        assert codec.unpack_sampling(codec.pack_sampling(plain)) == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rule", 0),
        ("rule", 99),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("stop_token_ids", b"\0"),
    ],
)
def test_sampling_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    """The message names the field that is wrong."""
    message = codec.pack_sampling(PARAMS)
    setattr(message, field, value)
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{field}: "):
        codec.unpack_sampling(message)


def test_opening_survives_and_may_be_absent() -> None:
    """Salt and priority travel with the sampling; a call without opening has none."""
    opening = SessionOpening(PARAMS, b"\0tenant", -3)
    call = common_pb2.SessionCall(opening=codec.pack_opening(opening))
    assert codec.unpack_opening(call) == opening
    assert codec.unpack_opening(common_pb2.SessionCall()) is None


def _good_call() -> common_pb2.SessionCall:
    return common_pb2.SessionCall(call_id=1, session_id="s")


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("call_id", lambda call: call.ClearField("call_id")),
        ("session_id", lambda call: call.ClearField("session_id")),
        (
            "append_token_ids",
            lambda call: setattr(
                call, "append_token_ids", b"\0" * 4 * (codec.MAX_APPEND_TOKENS + 1)
            ),
        ),
    ],
)
def test_session_part_is_checked_by_name(
    field: str, spoil: Callable[[common_pb2.SessionCall], None]
) -> None:
    """What can be known wrong without the session is refused before the device sees it."""
    call = _good_call()
    codec.check_session(call)
    spoil(call)
    with pytest.raises(InvalidRequest, match=rf"^{field}: "):
        codec.check_session(call)


def test_timing_and_load_survive() -> None:
    """Figures of time and load come back as they were."""
    timing, load = CallTiming(0.5, 0.25, 3, 17), EngineLoad(5, 9, 2, 1, 2**40)
    message = codec.pack_timing(timing, 12)
    assert codec.unpack_timing(message) == timing
    assert message.cached_tokens == 12
    assert codec.unpack_load(codec.pack_load(load)) == load
