"""The bodies of answers, in OpenAI's shapes. Values only: knows no request and no block.

A field that is only there when asked for is left out while it is None; every other field is always
there, null included, because strict clients refuse a chunk that lacks one.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

from specserve.gateway.blocks import FinishReason, TokenOrigin

T = TypeVar("T")


def _is_none(value: object) -> bool:
    return value is None


IfAsked = Annotated[T | None, Field(exclude_if=_is_none)]


class Answer(BaseModel):
    """Base of everything that is sent."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class PromptTokensDetails(Answer):
    """What `prompt_tokens` is made of."""

    cached_tokens: int
    """Prompt tokens that the target had in its prefix cache."""


class Usage(Answer):
    """Tokens in and out. Each prompt counts once, however many choices it has."""

    prompt_tokens: int
    """Tokens of all prompts."""
    completion_tokens: int
    """Emitted tokens of all choices; the token that completes a stop counts."""
    total_tokens: int
    """Their sum."""
    prompt_tokens_details: PromptTokensDetails
    """What `prompt_tokens` is made of."""


class ProposerFigures(Answer):
    """What one proposer did."""

    num_spec_steps: int
    """Rounds that verified its draft tokens."""
    num_draft_tokens: int
    """Its draft tokens that were verified."""
    num_accepted_draft_tokens: int
    """Its draft tokens that were accepted."""


class SpeculativeDecoding(Answer):
    """What speculation did for one body, all choices together, over emitted tokens only."""

    mean_acceptance_length: float
    """Tokens per round that verified draft tokens, the replacement or bonus token included."""
    draft_acceptance_rate: float
    """Accepted / verified draft tokens; 0 when none was verified."""
    acceptance_histogram: list[int]
    """Entry i: rounds that accepted exactly i draft tokens."""
    num_spec_steps: int
    """Rounds that verified at least one draft token."""
    num_plain_steps: int
    """Rounds without draft tokens."""
    num_accepted_draft_tokens: int
    """Draft tokens accepted and emitted."""
    num_draft_tokens: int
    """Draft tokens verified."""
    num_spec_tokens: int
    """K asked for."""
    num_recovered_tokens: int
    """Replacements of rejected draft tokens."""
    num_bonus_tokens: int
    """Tokens behind whole accepted blocks."""
    num_plain_tokens: int
    """Tokens of rounds without draft tokens."""
    num_late_proposals: int
    """Proposals that came after their round."""
    draft_s: float
    """Seconds waited for proposals."""
    verify_s: float
    """Seconds waited for verification."""
    proposers: dict[str, ProposerFigures]
    """{draft_model, ngram or suffix: its part of the figures above}; those that were used."""
    per_step_drafted: IfAsked[list[list[int]]] = None
    """One list per choice; level `detailed` only."""
    per_step_accepted: IfAsked[list[list[int]]] = None
    """One list per choice; level `detailed` only."""
    per_step_proposer: IfAsked[list[list[str]]] = None
    """One list per choice; level `detailed` only."""


class TokenProvenance(Answer):
    """Where one token came from."""

    origin: TokenOrigin
    """Accepted, recovered, bonus or plain."""
    round: int
    """Number of its round, from 1; an orchestrator that took over counts anew."""
    position: int
    """Its place in the round, from 0."""
    proposer: str | None
    """Who drafted in this round; null where nobody did."""
    draft_replica: str | None
    """Replica that drafted; null where no draft service did."""
    draft_revision: str | None
    """Revision of its model, or the first digits of its weights' fingerprint."""
    target_replica: str
    """Replica that verified."""
    p: float | None
    """The target's probability of the draft token here: of this token where it was accepted, of the
    rejected one where it was recovered. By equality, 1 or 0, for greedy and coupled."""
    q: float | None
    """The draft's probability of that token; null where the rule needs none."""


class Metrics(Answer):
    """Figures of one request."""

    speculative_decoding: SpeculativeDecoding
    """What speculation did."""


class CompletionLogprobs(Answer):
    """Log-probabilities of `/v1/completions`; all lists run along the tokens."""

    tokens: list[str]
    """Texts of the tokens; `bytes:\\x..` for one that is no whole text by itself."""
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, which nothing comes before."""
    top_logprobs: list[dict[str, float] | None]
    """Empty when only the tokens themselves were asked for; null where `token_logprobs` is."""
    text_offset: list[int]
    """Characters of the choice's text before the token."""


# No model: an answer may hold a million, and these take a third of the memory.
@dataclass(frozen=True, slots=True, config=ConfigDict(use_attribute_docstrings=True))
class PromptLogprob:
    """A token in one place of the prompt."""

    logprob: float
    """Natural logarithm, of the unmodified target distribution."""
    rank: int | None
    """1 for the most likely token; null for one that is not among those told."""
    decoded_token: str
    """What the token reads like by itself."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per token of the prompt, {token id: its figures}: the prompt's own token and the most
likely ones. Null for the first, which nothing comes before."""


class CompletionChoice(Answer):
    """One choice, or what is new of it."""

    index: int
    """Number of the choice: those of a prompt are numbered one after the other."""
    text: str
    """Text, or what is new of it; with `echo` it begins with the prompt."""
    logprobs: CompletionLogprobs | None
    """Log-probabilities, if asked for."""
    finish_reason: FinishReason | None
    """`stop` or `length`; null until the last chunk of a choice."""
    token_ids: IfAsked[list[int]] = None
    """Emitted tokens, with `return_token_ids`."""
    token_origins: IfAsked[list[TokenOrigin]] = None
    """Where each token came from; level `detailed` only."""
    token_provenance: IfAsked[list[TokenProvenance]] = None
    """Round, replicas and probabilities of each token; level `detailed` only."""
    prompt_logprobs: IfAsked[PromptLogprobs] = None
    """With the request field of this name; on the first chunk of a choice."""


class Completion(Answer):
    """The answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    """Id of the request, in traces and logs too."""
    object: Literal["text_completion"] = "text_completion"
    """Always this."""
    created: int
    """When the request was read, in seconds since 1970."""
    model: str
    """Served model name."""
    system_fingerprint: str
    """Names the target's weights and number format: another one may say other texts."""
    choices: list[CompletionChoice]
    """In order of their numbers; of a chunk one, or none beside the usage."""
    usage: Usage | None = None
    """Tokens in and out; of a stream only where `stream_options` asks for it."""
    metrics: IfAsked[Metrics] = None
    """With `speculation_metrics`; on the last chunk of a stream."""


class TopLogprob(Answer):
    """One likely token."""

    token: str
    """Its text; U+FFFD where it is no whole character."""
    logprob: float
    """Natural logarithm, of the unmodified target distribution."""
    bytes: list[int]
    """Its bytes."""


class ChatTokenLogprob(TopLogprob):
    """One emitted token and the likely ones in its place."""

    top_logprobs: list[TopLogprob]
    """The likely ones, most likely first."""


class ChatLogprobs(Answer):
    """Log-probabilities of `/v1/chat/completions`."""

    content: list[ChatTokenLogprob]
    """One entry per emitted token."""
    refusal: None = None
    """Always null."""


class ChatMessageAnswer(Answer):
    """What the assistant said."""

    role: Literal["assistant"] = "assistant"
    """Always this."""
    content: str
    """Text."""
    refusal: None = None
    """Always null."""


class ChatDelta(Answer):
    """What is new of it."""

    role: IfAsked[Literal["assistant"]] = None
    """On the first chunk of a choice."""
    content: IfAsked[str] = None
    """Text that is new."""


class ChatChoice(Answer):
    """One choice."""

    index: int
    """Number of the choice."""
    message: ChatMessageAnswer
    """What the assistant said."""
    logprobs: ChatLogprobs | None
    """Log-probabilities, if asked for."""
    finish_reason: FinishReason
    """`stop` or `length`."""
    token_ids: IfAsked[list[int]] = None
    """Emitted tokens, with `return_token_ids`."""
    token_origins: IfAsked[list[TokenOrigin]] = None
    """Where each token came from; level `detailed` only."""
    token_provenance: IfAsked[list[TokenProvenance]] = None
    """Round, replicas and probabilities of each token; level `detailed` only."""


class ChatChunkChoice(Answer):
    """What is new of one choice."""

    index: int
    """Number of the choice."""
    delta: ChatDelta
    """What is new."""
    logprobs: ChatLogprobs | None
    """Log-probabilities of the new tokens, if asked for."""
    finish_reason: FinishReason | None
    """`stop` or `length`; null until the last chunk of a choice."""
    token_ids: IfAsked[list[int]] = None
    """Emitted tokens, with `return_token_ids`."""
    token_origins: IfAsked[list[TokenOrigin]] = None
    """Where each token came from; level `detailed` only."""
    token_provenance: IfAsked[list[TokenProvenance]] = None
    """Round, replicas and probabilities of each token; level `detailed` only."""


class ChatCompletion(Answer):
    """The answer of `/v1/chat/completions`."""

    id: str
    """Id of the request, in traces and logs too."""
    object: Literal["chat.completion"] = "chat.completion"
    """Always this."""
    created: int
    """When the request was read, in seconds since 1970."""
    model: str
    """Served model name."""
    system_fingerprint: str
    """Names the target's weights and number format: another one may say other texts."""
    choices: list[ChatChoice]
    """In order of their numbers."""
    usage: Usage
    """Tokens in and out."""
    metrics: IfAsked[Metrics] = None
    """With `speculation_metrics`."""
    prompt_logprobs: IfAsked[PromptLogprobs] = None
    """With the request field of this name."""


class ChatCompletionChunk(Answer):
    """One chunk of its stream."""

    id: str
    """Id of the request, in traces and logs too."""
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    """Always this."""
    created: int
    """When the request was read, in seconds since 1970."""
    model: str
    """Served model name."""
    system_fingerprint: str
    """Names the target's weights and number format: another one may say other texts."""
    choices: list[ChatChunkChoice]
    """One, or none beside the usage."""
    usage: Usage | None = None
    """Only where `stream_options` asks for it."""
    metrics: IfAsked[Metrics] = None
    """With `speculation_metrics`; on the last chunk."""
    prompt_logprobs: IfAsked[PromptLogprobs] = None
    """On the first chunk alone."""


class ErrorDetails(Answer):
    """What went wrong."""

    message: str
    """What was found and what was wanted, for people."""
    type: str
    """Kind of error, as OpenAI names them."""
    param: str | None
    """The request field at fault, if one is."""
    code: str | None
    """Stable code for programs, if there is one."""


class ErrorAnswer(Answer):
    """Any error."""

    error: ErrorDetails
    """What went wrong."""


class ModelCard(Answer):
    """A served model."""

    id: str
    """Name to ask for."""
    object: Literal["model"] = "model"
    """Always this."""
    created: int
    """When the gateway started, in seconds since 1970."""
    owned_by: Literal["specserve"] = "specserve"
    """Always this."""
    max_model_len: int
    """Longest sequence in tokens; 0 means no limit."""


class ModelList(Answer):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    """Always this."""
    data: list[ModelCard]
    """The served model."""


class Alive(Answer):
    """The answer of `/health`."""

    status: Literal["alive"] = "alive"
    """Always this."""
    service: Literal["specserve"] = "specserve"
    """Always this: what answers on this port."""


class Readiness(Answer):
    """The answer of `/ready`, whether ready or not."""

    ready: bool
    """Requests are taken, and a pair that fits is loaded."""
    reason: str
    """Why not; of a ready pair why it does not speculate, if it does not."""


class PairReadiness(Readiness):
    """The same, where an orchestrator could be asked."""

    target: str | None
    """The target's model id."""
    draft: str | None
    """The draft's model id."""
    speculation_enabled: bool
    """Whether rounds may have draft tokens at present."""
    num_speculative_tokens: int
    """Configured K."""
    lossless: bool
    """False for synthetic acceptance, which is for benchmarks alone."""
