"""Checks a GenerateRequest against the served pair and makes a RequestState of it.

Knows the contract and the pair's limits; knows no replica.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, replace

from specserve.config import SpeculativeMethod
from specserve.errors import ContextOverflow, InvalidRequest
from specserve.orchestrator.device_deaths import DeviceDeaths
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.routing import prefix_key
from specserve.orchestrator.trimming import Trimmer
from specserve.orchestrator.vocabulary import Vocabulary
from specserve.rpc import codec
from specserve.rpc.v1 import generation_pb2
from specserve.speculation.constraint_checks import check_ids, complete_constraints
from specserve.speculation.digest import TokenChain
from specserve.speculation.types import AcceptanceRule

MAX_STOPS = 16
"""Stop strings of one request."""

MAX_LOGPROBS = 20
"""Top log-probabilities per token."""


@dataclass(frozen=True, slots=True)
class PairLimits:
    """What the served pair allows."""

    max_model_len: int
    """Prompt and output together, in tokens."""
    num_speculative_tokens: int
    """Configured K."""
    method: SpeculativeMethod | None = None
    """Configured proposer; None when speculation is off."""
    methods: tuple[SpeculativeMethod, ...] = ()
    """Proposers that a request may name."""
    block_size: int = 0
    """Tokens per KV block of the targets; 0 while that is not known."""


def admit(
    request: generation_pb2.GenerateRequest, vocabulary: Vocabulary, limits: PairLimits
) -> tuple[RequestState, Trimmer]:
    """Check a request and prepare its bookkeeping.

    Raises:
        InvalidRequest: a field is wrong; it is named, with the value and what was wanted.
        ContextOverflow: the prompt leaves no room for a token.
    """
    if not 0 <= request.timeout_s < math.inf:
        raise InvalidRequest("timeout_s", f"{request.timeout_s}, seconds >= 0 were wanted")
    if not request.request_id:
        raise InvalidRequest("request_id", "empty")
    prompt = codec.unpack_ids(request.prompt_token_ids, "prompt_token_ids")
    committed = codec.unpack_ids(request.committed_token_ids, "committed_token_ids")
    vocab_size = vocabulary.table.vocab_size
    if not prompt:
        raise InvalidRequest("prompt_token_ids", "empty; at least one token was wanted")
    check_ids("prompt_token_ids", prompt, vocab_size)
    check_ids("committed_token_ids", committed, vocab_size)
    if len(prompt) >= limits.max_model_len:
        raise ContextOverflow(
            "prompt",
            f"{len(prompt)} tokens leave no room in a context of {limits.max_model_len} tokens",
        )
    max_tokens = min(request.max_tokens, limits.max_model_len - len(prompt))
    if committed and len(committed) >= max_tokens:
        raise InvalidRequest(
            "committed_token_ids",
            f"{len(committed)} tokens, fewer than the {max_tokens} that may be output were wanted",
        )
    k = _num_speculative_tokens(request, limits)
    method = _method(request, limits)
    stop_ids = codec.unpack_ids(request.stop_token_ids, "stop_token_ids")
    check_ids("stop_token_ids", stop_ids, vocab_size)
    if len(request.stop) > MAX_STOPS or any(not s for s in request.stop):
        raise InvalidRequest("stop", f"at most {MAX_STOPS} non-empty strings were wanted")
    sampling = codec.unpack_sampling(request.sampling)
    if sampling.num_logprobs > MAX_LOGPROBS:
        raise InvalidRequest("num_logprobs", f"{sampling.num_logprobs}, at most {MAX_LOGPROBS}")
    _check_prompt_logprobs(request, len(prompt))
    if (sampling.rule is AcceptanceRule.GREEDY) != (sampling.temperature == 0):
        raise InvalidRequest("sampling.rule", "greedy goes with temperature 0 and only with it")
    ends = frozenset(stop_ids) | (
        frozenset() if request.ignore_eos else frozenset(vocabulary.eos_token_ids)
    )
    if request.ignore_eos and sampling.constraints is not None and sampling.constraints.grammar:
        raise InvalidRequest("ignore_eos", "a grammar ends with EOS; together they cannot be had")
    constraints = complete_constraints(
        sampling.constraints,
        vocab_size=vocab_size,
        eos_token_ids=vocabulary.eos_token_ids,
        stop_token_ids=stop_ids,
        prompt_length=len(prompt),
        max_tokens=max_tokens,
    )
    min_tokens = 0 if sampling.constraints is None else sampling.constraints.min_tokens
    chain = TokenChain()
    chain.append((*prompt, *committed))
    state = RequestState(
        request_id=request.request_id,
        session_id=f"{request.request_id}-{uuid.uuid4().hex[:16]}",
        sampling=replace(sampling, stop_token_ids=tuple(sorted(ends)), constraints=constraints),
        prompt_length=len(prompt),
        max_tokens=max_tokens,
        max_model_len=limits.max_model_len,
        num_speculative_tokens=k,
        chain=chain,
        method=method,
        prefix_key=prefix_key(prompt, limits.block_size, request.tenant_salt),
        target_deaths=DeviceDeaths(request.num_device_deaths),
    )
    hidden = frozenset() if request.include_special_tokens else vocabulary.table.special_token_ids
    trimmer = Trimmer(
        vocabulary.table.token_bytes, hidden, ends, request.stop, max_tokens, min_tokens
    )
    # The text of a carried-over prefix was sent before; only its tail may still matter to stops.
    if committed and trimmer.take(committed).finish_reason is not None:
        raise InvalidRequest("committed_token_ids", "the text ends within them; nothing is left")
    return state, trimmer


def _check_prompt_logprobs(request: generation_pb2.GenerateRequest, prompt_length: int) -> None:
    wanted, received = (
        request.num_prompt_logprobs_plus_one - 1,
        request.num_prompt_logprobs_received,
    )
    if wanted > MAX_LOGPROBS:
        raise InvalidRequest("num_prompt_logprobs", f"{wanted}, at most {MAX_LOGPROBS}")
    if received >= prompt_length:
        raise InvalidRequest(
            "num_prompt_logprobs_received",
            f"{received}, fewer than the prompt's {prompt_length} tokens were wanted",
        )


def _num_speculative_tokens(request: generation_pb2.GenerateRequest, limits: PairLimits) -> int:
    if request.num_speculative_tokens_plus_one == 0:
        return limits.num_speculative_tokens
    k = request.num_speculative_tokens_plus_one - 1
    if k > limits.num_speculative_tokens:
        raise InvalidRequest(
            "num_speculative_tokens",
            f"{k}, at most the configured {limits.num_speculative_tokens} was wanted",
        )
    return k


def _method(
    request: generation_pb2.GenerateRequest, limits: PairLimits
) -> SpeculativeMethod | None:
    method = codec.unpack_method(request.speculative_method)
    if method is None:
        return limits.method
    if method not in limits.methods:
        choices = " or ".join(limits.methods) or "none, for speculation is off"
        raise InvalidRequest("speculative_method", f"{method}; this deployment offers {choices}")
    return method
