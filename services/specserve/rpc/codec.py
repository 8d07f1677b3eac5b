"""Messages as the values the rest of the code uses; bulk numbers are `arrays.py`'s.

Both directions, for the parts that draft and target share. Knows protobuf; knows no gRPC call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from specserve.config import SpeculativeMethod
from specserve.errors import InvalidProposal, InvalidRequest
from specserve.model.messages import CallTiming, EngineLoad, SessionOpening
from specserve.rpc.arrays import pack_ids as pack_ids  # noqa: PLC0414 - a name of this module too
from specserve.rpc.arrays import unpack_array as unpack_array  # noqa: PLC0414 - a name of this module too
from specserve.rpc.arrays import unpack_doubles as unpack_doubles  # noqa: PLC0414 - a name of this module too
from specserve.rpc.arrays import unpack_ids as unpack_ids  # noqa: PLC0414 - a name of this module too
from specserve.rpc.constraints_codec import pack_constraints, unpack_constraints
from specserve.rpc.v1 import common_pb2, generation_pb2
from specserve.speculation.length_choice import SpeculationMode
from specserve.speculation.types import AcceptanceRule, SamplingParams, SparseProbs

PROTOCOL_VERSION = 1
"""Version of the contract that this build speaks; it accepts its own and the one before."""

MAX_APPEND_TOKENS = 65_536
"""Tokens appended by one call: 256 KiB of int32."""

_RULES = {
    AcceptanceRule.GREEDY: common_pb2.ACCEPTANCE_RULE_GREEDY,
    AcceptanceRule.STANDARD: common_pb2.ACCEPTANCE_RULE_STANDARD,
    AcceptanceRule.COUPLED: common_pb2.ACCEPTANCE_RULE_COUPLED,
}
_RULES_BACK = {number: rule for rule, number in _RULES.items()}

_METHODS: dict[SpeculativeMethod | None, generation_pb2.SpeculativeMethod] = {
    None: generation_pb2.SPECULATIVE_METHOD_UNSPECIFIED,
    "draft_model": generation_pb2.SPECULATIVE_METHOD_DRAFT_MODEL,
    "ngram": generation_pb2.SPECULATIVE_METHOD_NGRAM,
    "suffix": generation_pb2.SPECULATIVE_METHOD_SUFFIX,
    "cascade": generation_pb2.SPECULATIVE_METHOD_CASCADE,
}
_METHODS_BACK: dict[int, SpeculativeMethod | None] = {
    number: method for method, number in _METHODS.items()
}


def unpack_probs(
    support_size: int, token_ids: bytes, weights: bytes, num_rows: int
) -> SparseProbs | None:
    """Read q of `num_rows` draft tokens; None when no support was sent.

    Raises:
        InvalidProposal: the shapes disagree.
    """
    if support_size == 0:
        return None
    ids = unpack_array(token_ids, np.int32, "support_token_ids")
    values = unpack_array(weights, np.float32, "support_weights")
    if ids.size != num_rows * support_size or values.size != ids.size:
        raise InvalidProposal(
            f"draft_probs: {ids.size} ids and {values.size} weights, "
            f"[{num_rows}, {support_size}] was wanted"
        )
    shape = (num_rows, support_size)
    return SparseProbs(ids.reshape(shape), values.reshape(shape))


def pack_probs(probs: SparseProbs | None) -> tuple[int, bytes, bytes]:
    """Write q as (support_size, support_token_ids, support_weights)."""
    if probs is None:
        return 0, b"", b""
    return (
        probs.token_ids.shape[1],
        probs.token_ids.astype("<i4", copy=False).tobytes(),
        probs.weights.astype("<f4", copy=False).tobytes(),
    )


def pack_sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    """Write sampling parameters."""
    return common_pb2.SamplingParams(
        rule=pack_rule(params.rule),
        seed=params.seed,
        choice=params.choice,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        stop_token_ids=pack_ids(params.stop_token_ids),
        num_logprobs_plus_one=params.num_logprobs + 1,
        constraints=None if params.constraints is None else pack_constraints(params.constraints),
    )


def pack_rule(rule: AcceptanceRule) -> common_pb2.AcceptanceRule:
    """Write an acceptance rule."""
    return _RULES[rule]


def unpack_sampling(message: common_pb2.SamplingParams) -> SamplingParams:
    """Read and check sampling parameters.

    Raises:
        InvalidRequest: a value is out of its range; the field is named.
    """
    rule = _RULES_BACK.get(message.rule)
    if rule is None:
        raise InvalidRequest("sampling.rule", f"{message.rule} is no acceptance rule")
    if not (math.isfinite(message.temperature) and message.temperature >= 0):
        raise InvalidRequest("sampling.temperature", f"{message.temperature}, >= 0 was wanted")
    if not 0 < message.top_p <= 1:
        raise InvalidRequest("sampling.top_p", f"{message.top_p}, a value in (0, 1] was wanted")
    if not 0 <= message.min_p <= 1:
        raise InvalidRequest("sampling.min_p", f"{message.min_p}, a value in [0, 1] was wanted")
    return SamplingParams(
        rule=rule,
        seed=message.seed,
        choice=message.choice,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        stop_token_ids=unpack_ids(message.stop_token_ids, "sampling.stop_token_ids"),
        num_logprobs=message.num_logprobs_plus_one - 1,
        constraints=(
            unpack_constraints(message.constraints) if message.HasField("constraints") else None
        ),
    )


def pack_opening(opening: SessionOpening) -> common_pb2.SessionOpening:
    """Write what is fixed for a session's life."""
    return common_pb2.SessionOpening(
        sampling=pack_sampling(opening.sampling),
        tenant_salt=opening.tenant_salt,
        priority=opening.priority,
        age_s=opening.age_s,
    )


def unpack_opening(call: common_pb2.SessionCall) -> SessionOpening | None:
    """Read a call's opening, if it carries one.

    Raises:
        InvalidRequest: a field is out of range; it is named.
    """
    if not call.HasField("opening"):
        return None
    message = call.opening
    if not 0 <= message.age_s < math.inf:
        raise InvalidRequest("age_s", f"{message.age_s}, seconds >= 0 were wanted")
    return SessionOpening(
        sampling=unpack_sampling(message.sampling),
        tenant_salt=message.tenant_salt,
        priority=message.priority,
        age_s=message.age_s,
    )


def check_session(call: common_pb2.SessionCall) -> None:
    """Check what can be checked of a call without its session.

    Raises:
        InvalidRequest: a field is missing or out of range; it is named.
    """
    if call.call_id == 0:
        raise InvalidRequest("call_id", "0, a number that is unique on the stream was wanted")
    if not call.session_id:
        raise InvalidRequest("session_id", "empty")
    if len(call.append_token_ids) > 4 * MAX_APPEND_TOKENS:
        raise InvalidRequest(
            "append_token_ids",
            f"{len(call.append_token_ids) // 4} tokens in one call, at most {MAX_APPEND_TOKENS}",
        )


def pack_timing(timing: CallTiming, cached_tokens: int) -> common_pb2.CallTiming:
    """Write where a call's time went."""
    return common_pb2.CallTiming(
        queue_s=timing.queue_s,
        forward_s=timing.forward_s,
        batch_size=timing.batch_size,
        rows=timing.rows,
        cached_tokens=cached_tokens,
        hidden_tokens=timing.hidden_tokens,
        hidden_s=timing.hidden_s,
    )


def unpack_timing(message: common_pb2.CallTiming) -> CallTiming:
    """Read where a call's time went."""
    return CallTiming(
        message.queue_s,
        message.forward_s,
        message.batch_size,
        message.rows,
        message.hidden_tokens,
        message.hidden_s,
    )


def pack_load(load: EngineLoad) -> common_pb2.Load:
    """Write a replica's load."""
    return common_pb2.Load(
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        num_sessions=load.num_sessions,
        num_waiting=load.num_waiting,
        num_iterations=load.num_iterations,
        queue_s=load.queue_s,
        num_callers=load.num_callers,
        least_priority=load.least_priority,
        stuck_session_ids=load.stuck,
    )


def unpack_load(message: common_pb2.Load) -> EngineLoad:
    """Read a replica's load."""
    return EngineLoad(
        message.num_free_blocks,
        message.num_blocks,
        message.num_sessions,
        message.num_waiting,
        message.num_iterations,
        queue_s=message.queue_s,
        num_callers=message.num_callers,
        least_priority=message.least_priority,
        stuck=tuple(message.stuck_session_ids),
    )


def pack_method(method: SpeculativeMethod | None) -> generation_pb2.SpeculativeMethod:
    """Write a proposer's name; None is UNSPECIFIED."""
    return _METHODS[method]


def unpack_method(number: int) -> SpeculativeMethod | None:
    """Read a proposer's name; None is UNSPECIFIED.

    Raises:
        InvalidRequest: a number that this build does not know.
    """
    if number not in _METHODS_BACK:
        raise InvalidRequest("speculative_method", f"{number} is not known to this build")
    return _METHODS_BACK[number]


_MODES = {
    SpeculationMode.OFF: generation_pb2.SPECULATION_MODE_OFF,
    SpeculationMode.ON: generation_pb2.SPECULATION_MODE_ON,
    SpeculationMode.AUTO: generation_pb2.SPECULATION_MODE_AUTO,
}


def pack_mode(mode: SpeculationMode) -> generation_pb2.SpeculationMode:
    """Write how K is chosen."""
    return _MODES[mode]


def unpack_mode(number: int) -> SpeculationMode:
    """Read how K is chosen.

    Raises:
        InvalidRequest: not said, or a number that this build does not know.
    """
    for mode, known in _MODES.items():
        if known == number:
            return mode
    raise InvalidRequest("mode", f"{number} is not known to this build; off, on or auto was wanted")


def unpack_methods(numbers: Iterable[int]) -> tuple[SpeculativeMethod, ...]:
    """Read proposers' names; what a newer build calls otherwise is left out."""
    methods = (_METHODS_BACK.get(number) for number in numbers)
    return tuple(method for method in methods if method is not None)
