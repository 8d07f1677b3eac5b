"""A checked body becomes one decode request per choice.

Knows the served pair's limits, the acceptance rules and the contract; knows no HTTP and no text.
Everything a client can get wrong about numbers is refused here, before another process sees it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.config import SpeculativeMethod
from specserve.errors import ContextOverflow, InvalidRequest, quoted
from specserve.gateway.config import GatewayConfig
from specserve.gateway.errors import UnknownModel
from specserve.gateway.fields import GenerationFields
from specserve.gateway.pair import ServedPair
from specserve.gateway.prompt_view import PromptView
from specserve.gateway.requests import ChatRequest, CompletionRequest
from specserve.gateway.tenants import Tenant
from specserve.gateway.wanted_logprobs import (
    check_prompt_entries,
    wanted_logprobs,
    wanted_prompt_logprobs,
)
from specserve.rpc.codec import pack_ids, pack_method, pack_sampling
from specserve.rpc.v1.generation_pb2 import GenerateRequest
from specserve.speculation.constraint_checks import check_ids, complete_constraints
from specserve.speculation.constraints import TokenConstraints
from specserve.speculation.types import GREEDY_TEMPERATURE, AcceptanceRule, SamplingParams

ENDLESS_CHAT_TOKENS = 4096
"""max_tokens of a chat that names none, where the context has no end."""


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """All of one body's choices, ready to be sent."""

    request_id: str
    """Id in the answer, in traces and logs."""
    model: str
    """Served model name."""
    system_fingerprint: str
    """In the answer; see ServedPair."""
    prompts: tuple[PromptView, ...]
    """Each prompt, as it is shown."""
    n: int
    """Choices per prompt."""
    max_tokens: int
    """Most output tokens of the choice that may have the most."""
    num_speculative_tokens: int
    """K of every choice."""
    choices: tuple[GenerateRequest, ...]
    """Choice i belongs to prompt i // n; a prompt's first one has its log-probabilities."""
    scores_prompts: bool = False
    """Prompts' log-probabilities come before their choices' tokens."""

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(len(prompt.token_ids) for prompt in self.prompts)


def acceptance_rule(body: GenerationFields, configured: str) -> AcceptanceRule:
    """Resolve `auto`: a request that names a seed wants the same tokens again.

    Synthetic acceptance replaces the orchestrator's decision; draft and target work as under auto.

    Raises:
        InvalidRequest: a rule is asked for that a synthetic deployment would not follow.
    """
    if body.temperature < GREEDY_TEMPERATURE:
        return AcceptanceRule.GREEDY
    if configured == "synthetic" and body.rejection_sample_method not in (None, "auto"):
        raise InvalidRequest(
            "rejection_sample_method",
            f"{body.rejection_sample_method}; this deployment accepts draft tokens by synthetic "
            "rates, for benchmarks, and follows no rule",
        )
    method = body.rejection_sample_method or configured
    if method in ("auto", "synthetic"):
        method = "standard" if body.seed is None else "coupled"
    return AcceptanceRule(method)


def check_model(name: str | None, pair: ServedPair) -> None:
    """Refuse a request for another model; `default` names the served one, whatever it is.

    Raises:
        UnknownModel: the name is not the served one.
    """
    if name not in (None, "default", pair.model):
        raise UnknownModel(name or "", pair.model)


def check_limits(body: GenerationFields, num_prompts: int, config: GatewayConfig) -> None:
    """Check what needs neither tokens nor pair, so that a wrong body costs no tokenisation.

    Raises:
        InvalidRequest: the field at fault is named.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "only together with stream: true")
    if len(body.stop) > config.max_stops:
        raise InvalidRequest("stop", f"{len(body.stop)} strings, at most {config.max_stops}")
    if body.n > config.max_n:
        raise InvalidRequest("n", f"{quoted(body.n)}, at most {config.max_n}")
    if num_prompts > config.max_prompts:
        raise InvalidRequest("prompt", f"{num_prompts} prompts, at most {config.max_prompts}")
    if num_prompts * body.n > config.max_choices:
        raise InvalidRequest(
            "n",
            f"{num_prompts} prompts times {body.n} choices, at most {config.max_choices} in all",
        )
    if body.max_tokens == 0 and not (isinstance(body, CompletionRequest) and body.echo):
        raise InvalidRequest("max_tokens", "0 only together with echo; at least 1 was wanted")
    if (body.prompt_logprobs or 0) > config.max_logprobs:
        raise InvalidRequest(
            "prompt_logprobs", f"{quoted(body.prompt_logprobs)}, at most {config.max_logprobs}"
        )
    if isinstance(body, ChatRequest):
        if body.top_logprobs > config.max_logprobs:
            raise InvalidRequest(
                "top_logprobs", f"{quoted(body.top_logprobs)}, at most {config.max_logprobs}"
            )
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs", "only together with logprobs: true")
    if isinstance(body, CompletionRequest) and (body.logprobs or 0) > config.max_logprobs:
        raise InvalidRequest("logprobs", f"{quoted(body.logprobs)}, at most {config.max_logprobs}")


def check_priority(body: GenerationFields, tenant: Tenant) -> None:
    """Refuse a priority that the tenant may not claim.

    Raises:
        InvalidRequest: a smaller one than its best was named.
    """
    best = tenant.limits.best_priority
    if best is not None and body.priority < best:
        raise InvalidRequest(
            "priority", f"{body.priority}; at least {best} was wanted, this tenant's most urgent"
        )


def make_plan(
    request_id: str,
    body: CompletionRequest | ChatRequest,
    prompts: Sequence[PromptView],
    pair: ServedPair,
    config: GatewayConfig,
    constraints: TokenConstraints | None = None,
) -> GenerationPlan:
    """Check the body against the pair and number its choices.

    Raises:
        ContextOverflow: a prompt leaves no room for one token.
        InvalidRequest: the field at fault is named.
    """
    where = "messages" if isinstance(body, ChatRequest) else "prompt"
    for number, prompt in enumerate(prompts):
        _check_prompt(where, number, prompt.token_ids, pair)
    check_prompt_entries(body, [len(prompt.token_ids) for prompt in prompts])
    check_ids("stop_token_ids", body.stop_token_ids, pair.vocab_size)
    if (body.num_speculative_tokens or 0) > pair.num_speculative_tokens:
        raise InvalidRequest(
            "num_speculative_tokens",
            f"{quoted(body.num_speculative_tokens)}, at most {pair.num_speculative_tokens} "
            "is configured",
        )
    _check_method(body.speculative_method, pair)
    rule = acceptance_rule(body, pair.rejection_sample_method)
    # Drawn once: a request that is carried over to another orchestrator keeps its randomness.
    seed = secrets.randbits(64) if body.seed is None else body.seed % 2**64
    max_tokens = [_max_tokens(body, len(prompt.token_ids), pair, config) for prompt in prompts]
    num_prompt_logprobs = max(wanted_prompt_logprobs(body).values(), default=-1)
    # Made once: its constraints may be as large as the vocabulary, and choices are many.
    template = GenerateRequest(
        sampling=pack_sampling(
            SamplingParams(
                rule=rule,
                seed=seed,
                choice=0,
                temperature=0.0 if rule is AcceptanceRule.GREEDY else body.temperature,
                top_k=max(body.top_k, 0),
                top_p=body.top_p,
                min_p=body.min_p,
                num_logprobs=wanted_logprobs(body),
                constraints=_complete(body, constraints, min(max_tokens), pair),
            )
        ),
        num_speculative_tokens_plus_one=(
            0 if body.num_speculative_tokens is None else body.num_speculative_tokens + 1
        ),
        speculative_method=pack_method(body.speculative_method),
        stop=[text.encode() for text in body.stop],
        stop_token_ids=pack_ids(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        # The contract counts the other way round.
        priority=-body.priority,
        timeout_s=config.request_timeout_s,
        # Whoever asked for none still gets a right record if the orchestrator's own is lost.
        include_origins=True,
        include_provenance=body.speculation_metrics == "detailed",
        include_special_tokens=not body.skip_special_tokens,
    )
    choices: list[GenerateRequest] = []
    for prompt, most in zip(prompts, max_tokens, strict=True):
        template.prompt_token_ids = pack_ids(prompt.token_ids)
        template.max_tokens = most
        if template.sampling.HasField("constraints"):
            template.sampling.constraints.prompt_length = len(prompt.token_ids)
        for number in range(body.n):
            index = len(choices)
            choice = GenerateRequest(request_id=f"{request_id}-{index}")
            choice.MergeFrom(template)
            choice.sampling.choice = index
            choice.num_prompt_logprobs_plus_one = (num_prompt_logprobs + 1) * (number == 0)
            choices.append(choice)
    return GenerationPlan(
        request_id=request_id,
        model=pair.model,
        system_fingerprint=pair.system_fingerprint,
        prompts=tuple(prompts),
        n=body.n,
        max_tokens=max(max_tokens),
        num_speculative_tokens=(
            pair.num_speculative_tokens
            if body.num_speculative_tokens is None
            else body.num_speculative_tokens
        ),
        choices=tuple(choices),
        scores_prompts=num_prompt_logprobs >= 0,
    )


def _check_prompt(where: str, number: int, prompt: Sequence[int], pair: ServedPair) -> None:
    if not prompt:
        raise InvalidRequest(where, f"prompt {number} has no tokens; at least one was wanted")
    # One place must be left: a text of the whole context's length could say nothing.
    if pair.max_model_len and len(prompt) >= pair.max_model_len:
        raise ContextOverflow(
            where,
            f"prompt {number} has {len(prompt)} tokens and the context holds "
            f"{pair.max_model_len}, so no token could follow",
        )
    check_ids(where, prompt, pair.vocab_size)


def _complete(
    body: CompletionRequest | ChatRequest,
    constraints: TokenConstraints | None,
    max_tokens: int,
    pair: ServedPair,
) -> TokenConstraints | None:
    """Complete what all choices share; each one's prompt_length is filled in with its prompt.

    Args:
        max_tokens: of the choice that may have the fewest.
    """
    if len(body.allowed_token_ids) > pair.vocab_size:
        raise InvalidRequest(
            "allowed_token_ids",
            f"{len(body.allowed_token_ids)} ids, at most {pair.vocab_size} were wanted, the whole "
            "vocabulary",
        )
    return complete_constraints(
        constraints,
        vocab_size=pair.vocab_size,
        eos_token_ids=pair.eos_token_ids,
        stop_token_ids=body.stop_token_ids,
        prompt_length=0,
        max_tokens=max_tokens,
    )


def _check_method(method: SpeculativeMethod | None, pair: ServedPair) -> None:
    if method is not None and method not in pair.speculative_methods:
        choices = " or ".join(pair.speculative_methods) or "none, for speculation is off"
        raise InvalidRequest("speculative_method", f"{method}; this deployment offers {choices}")


def _max_tokens(
    body: CompletionRequest | ChatRequest,
    prompt_length: int,
    pair: ServedPair,
    config: GatewayConfig,
) -> int:
    asked: int | None = body.max_tokens
    room = pair.max_model_len - prompt_length if pair.max_model_len else None
    if isinstance(body, ChatRequest):
        asked = body.max_completion_tokens or asked or config.default_chat_tokens or room
        asked = asked or ENDLESS_CHAT_TOKENS
    if asked is None:
        asked = config.default_completion_tokens
    return asked if room is None else min(asked, room)
