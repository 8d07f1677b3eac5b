"""A wrong request is refused before any other process sees it, and the field is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specserve.errors import ContextOverflow, InvalidRequest
from specserve.model.token_table import TokenTable
from specserve.orchestrator.admission import MAX_LOGPROBS, MAX_STOPS, PairLimits, admit
from specserve.orchestrator.vocabulary import Vocabulary
from specserve.rpc import codec
from specserve.rpc.v1 import common_pb2, generation_pb2
from specserve.speculation.types import AcceptanceRule

TABLE = TokenTable((b"<eos>", b"a", b"b", b"c", b"d"), frozenset({0}))
VOCABULARY = Vocabulary(TABLE.fingerprint, TABLE, (0,))
LIMITS = PairLimits(
    max_model_len=16, num_speculative_tokens=4, method="ngram", methods=("ngram", "suffix")
)


def make(**fields: Any) -> generation_pb2.GenerateRequest:
    """Make a good request, and change some fields of it."""
    request = generation_pb2.GenerateRequest(
        request_id="r",
        prompt_token_ids=codec.pack_ids((1, 2, 3)),
        max_tokens=5,
        sampling=common_pb2.SamplingParams(
            rule=common_pb2.ACCEPTANCE_RULE_STANDARD, seed=9, temperature=1.0, top_p=1.0
        ),
    )
    for name, value in fields.items():
        if name.startswith("sampling_"):
            setattr(request.sampling, name.removeprefix("sampling_"), value)
        elif name == "stop":
            request.stop.extend(value)
        else:
            setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("request_id", {"request_id": ""}),
        ("prompt_token_ids", {"prompt_token_ids": b""}),
        ("prompt_token_ids", {"prompt_token_ids": b"123"}),
        ("prompt_token_ids", {"prompt_token_ids": codec.pack_ids((1, 5))}),
        ("prompt_token_ids", {"prompt_token_ids": codec.pack_ids((-1,))}),
        ("prompt_token_ids", {"prompt_token_ids": codec.pack_ids((2**31 - 1,))}),
        ("prompt", {"prompt_token_ids": codec.pack_ids((1,) * 16)}),
        ("prompt", {"prompt_token_ids": codec.pack_ids((1,) * 17)}),
        ("committed_token_ids", {"committed_token_ids": b"1"}),
        ("committed_token_ids", {"committed_token_ids": codec.pack_ids((9,))}),
        ("committed_token_ids", {"committed_token_ids": codec.pack_ids((1,) * 5)}),
        (
            "committed_token_ids",
            {"committed_token_ids": codec.pack_ids((1,) * 13), "max_tokens": 100},
        ),
        ("committed_token_ids", {"committed_token_ids": codec.pack_ids((1, 0))}),
        ("committed_token_ids", {"committed_token_ids": codec.pack_ids((1, 2)), "stop": [b"ab"]}),
        ("committed_token_ids", {"committed_token_ids": codec.pack_ids((1,)), "max_tokens": 0}),
        ("num_prompt_logprobs", {"num_prompt_logprobs_plus_one": 22}),
        ("num_prompt_logprobs_received", {"num_prompt_logprobs_received": 3}),
        ("num_speculative_tokens", {"num_speculative_tokens_plus_one": 6}),
        ("stop_token_ids", {"stop_token_ids": codec.pack_ids((5,))}),
        ("stop_token_ids", {"stop_token_ids": b"12345"}),
        ("stop", {"stop": [b"x"] * (MAX_STOPS + 1)}),
        ("stop", {"stop": [b""]}),
        ("timeout_s", {"timeout_s": -1.0}),
        ("timeout_s", {"timeout_s": math.nan}),
        ("timeout_s", {"timeout_s": math.inf}),
        ("speculative_method", {"speculative_method": 9}),
        ("speculative_method", {"speculative_method": codec.pack_method("cascade")}),
        ("num_logprobs", {"sampling_num_logprobs_plus_one": MAX_LOGPROBS + 2}),
        ("num_logprobs", {"sampling_num_logprobs_plus_one": 2**32 - 1}),
        ("sampling.rule", {"sampling_rule": 0}),
        ("sampling.rule", {"sampling_rule": common_pb2.ACCEPTANCE_RULE_GREEDY}),
        ("sampling.rule", {"sampling_temperature": 0.0}),
        ("sampling.temperature", {"sampling_temperature": -1.0}),
        ("sampling.temperature", {"sampling_temperature": math.nan}),
        ("sampling.top_p", {"sampling_top_p": 0.0}),
        ("sampling.min_p", {"sampling_min_p": 2.0}),
    ],
)
def test_wrong_field_is_named_B226(field: str, fields: dict[str, Any]) -> None:
    """Each field that can be wrong, wrong once."""
    with pytest.raises(InvalidRequest) as caught:
        admit(make(**fields), VOCABULARY, LIMITS)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_prompt_that_fills_the_context_is_told_both_numbers_B086() -> None:
    """limit - 1 tokens leave room for one; limit and more are ContextOverflow."""
    state, _ = admit(
        make(prompt_token_ids=codec.pack_ids((1,) * 15), max_tokens=9), VOCABULARY, LIMITS
    )
    assert state.num_remaining_tokens == 1
    with pytest.raises(ContextOverflow, match="16 tokens .* of 16 tokens"):
        admit(make(prompt_token_ids=codec.pack_ids((1,) * 16)), VOCABULARY, LIMITS)


def test_good_request_becomes_its_state() -> None:
    """Lengths, K, the stops that decode-ahead obeys, and the digest of what is committed."""
    state, trimmer = admit(
        make(
            committed_token_ids=codec.pack_ids((3, 4)),
            stop_token_ids=codec.pack_ids((2,)),
            num_speculative_tokens_plus_one=3,
        ),
        VOCABULARY,
        LIMITS,
    )
    assert state.chain.tokens == [1, 2, 3, 3, 4]
    assert (state.prompt_length, state.committed_length) == (3, 5)
    assert (state.num_output_tokens, state.num_remaining_tokens) == (2, 3)
    assert state.num_speculative_tokens == 2
    assert state.sampling.rule is AcceptanceRule.STANDARD
    assert state.sampling.stop_token_ids == (0, 2)
    assert trimmer.take((1, 1, 1)).finish_reason is not None, "2 of 5 were output already"


@pytest.mark.parametrize(("plus_one", "k"), [(0, 4), (1, 0), (5, 4)])
def test_k_is_the_configured_one_unless_named(plus_one: int, k: int) -> None:
    """0 takes the configured K, 1 switches speculation off."""
    state, _ = admit(make(num_speculative_tokens_plus_one=plus_one), VOCABULARY, LIMITS)
    assert state.num_speculative_tokens == k


def test_the_method_is_the_configured_one_unless_named() -> None:
    """And one that is not offered is answered with those that are."""
    for named, method in ((None, "ngram"), ("suffix", "suffix"), ("ngram", "ngram")):
        state, _ = admit(make(speculative_method=codec.pack_method(named)), VOCABULARY, LIMITS)
        assert state.method == method
    request = make(speculative_method=codec.pack_method("draft_model"))
    with pytest.raises(InvalidRequest, match="draft_model; this deployment offers ngram or suffix"):
        admit(request, VOCABULARY, LIMITS)
    with pytest.raises(InvalidRequest, match="speculation is off"):
        admit(request, VOCABULARY, PairLimits(max_model_len=16, num_speculative_tokens=0))


def test_ignored_eos_ends_nothing() -> None:
    """Neither here nor in decode-ahead; stop ids still do."""
    state, trimmer = admit(
        make(ignore_eos=True, stop_token_ids=codec.pack_ids((2,))), VOCABULARY, LIMITS
    )
    assert state.sampling.stop_token_ids == (2,)
    assert trimmer.take((0, 1)).finish_reason is None
    assert trimmer.take((2,)).finish_reason is not None


def test_special_tokens_are_text_only_when_asked_for() -> None:
    """include_special_tokens shows their names."""
    for include, text in ((False, b"a"), (True, b"a<eos>")):
        _, trimmer = admit(make(include_special_tokens=include), VOCABULARY, LIMITS)
        assert trimmer.take((1, 0)).text == text


def test_sessions_of_one_request_id_never_meet() -> None:
    """A request that is sent again gets sessions of its own on every replica."""
    first, _ = admit(make(), VOCABULARY, LIMITS)
    second, _ = admit(make(), VOCABULARY, LIMITS)
    assert first.request_id == second.request_id
    assert first.session_id != second.session_id
