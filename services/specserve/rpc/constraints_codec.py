"""Token constraints as messages, and back; every range is checked again on the way in.

Knows protobuf and single fields; knows no vocabulary.
"""

from __future__ import annotations

import itertools

import numpy as np

from specserve.errors import InvalidRequest
from specserve.rpc.arrays import pack_ids, unpack_array, unpack_ids
from specserve.rpc.v1 import common_pb2
from specserve.speculation.constraints import TokenConstraints

MAX_REPETITION_PENALTY = 2.0
MAX_PENALTY = 2.0
"""Of presence and frequency penalty, on either side of 0."""
MAX_BIAS = 100.0
"""On either side of 0."""
MAX_GRAMMAR_CHARACTERS = 2**17
"""Twice what a client may write: quoting makes it longer."""


def pack_constraints(constraints: TokenConstraints) -> common_pb2.TokenConstraints:
    """Write constraints."""
    return common_pb2.TokenConstraints(
        prompt_length=constraints.prompt_length,
        repetition_penalty=constraints.repetition_penalty,
        presence_penalty=constraints.presence_penalty,
        frequency_penalty=constraints.frequency_penalty,
        bias_token_ids=pack_ids([token_id for token_id, _ in constraints.logit_bias]),
        biases=np.array([bias for _, bias in constraints.logit_bias], "<f8").tobytes(),
        bad_word_token_ids=pack_ids([*itertools.chain(*constraints.bad_words)]),
        bad_word_lengths=[len(word) for word in constraints.bad_words],
        allowed_token_ids=pack_ids(constraints.allowed_token_ids),
        min_tokens=constraints.min_tokens,
        end_token_ids=pack_ids(constraints.end_token_ids),
        grammar=constraints.grammar,
        eos_token_ids=pack_ids(constraints.eos_token_ids),
    )


def unpack_constraints(message: common_pb2.TokenConstraints) -> TokenConstraints:
    """Read and check constraints.

    Raises:
        InvalidRequest: a value is out of its range; the field is named.
    """
    if not 0 < message.repetition_penalty <= MAX_REPETITION_PENALTY:
        _refuse("repetition_penalty", message.repetition_penalty, f"(0, {MAX_REPETITION_PENALTY}]")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(message, name)
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            _refuse(name, penalty, f"[-{MAX_PENALTY}, {MAX_PENALTY}]")
    bias_ids = unpack_ids(message.bias_token_ids, "logit_bias")
    biases: list[float] = unpack_array(message.biases, np.float64, "logit_bias").tolist()
    if len(biases) != len(bias_ids) or len(set(bias_ids)) != len(bias_ids):
        raise InvalidRequest(
            "logit_bias", f"{len(biases)} values for {len(set(bias_ids))} ids, one each was wanted"
        )
    for bias in biases:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            _refuse("logit_bias", bias, f"[-{MAX_BIAS}, {MAX_BIAS}]")
    if len(message.grammar) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            "grammar",
            f"{len(message.grammar)} characters, at most {MAX_GRAMMAR_CHARACTERS} were wanted",
        )
    return TokenConstraints(
        prompt_length=message.prompt_length,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(bias_ids, biases, strict=True)),
        bad_words=_phrases(message),
        allowed_token_ids=unpack_ids(message.allowed_token_ids, "allowed_token_ids"),
        min_tokens=message.min_tokens,
        end_token_ids=unpack_ids(message.end_token_ids, "end_token_ids"),
        grammar=message.grammar,
        eos_token_ids=unpack_ids(message.eos_token_ids, "eos_token_ids"),
    )


def _phrases(message: common_pb2.TokenConstraints) -> tuple[tuple[int, ...], ...]:
    token_ids = unpack_ids(message.bad_word_token_ids, "bad_words")
    lengths = list(message.bad_word_lengths)
    if sum(lengths) != len(token_ids) or 0 in lengths:
        raise InvalidRequest(
            "bad_words",
            f"{len(token_ids)} ids for phrases of {sum(lengths)}, none of them empty, were wanted",
        )
    ends = itertools.accumulate(lengths)
    return tuple(token_ids[end - length : end] for length, end in zip(lengths, ends, strict=True))


def _refuse(field: str, value: float, wanted: str) -> None:
    raise InvalidRequest(field, f"{value}, a value in {wanted} was wanted")
