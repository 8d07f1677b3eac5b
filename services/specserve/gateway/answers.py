"""The bodies of answers, in OpenAI's shapes. Values only: knows no request and no block.

A field that is only there when asked for is left out while it is None; every other field is always
there, null included, because strict clients refuse a chunk that lacks one.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from specserve.gateway.blocks import FinishReason, TokenOrigin

T = TypeVar("T")


def _is_none(value: object) -> bool:
    return value is None


IfAsked = Annotated[T | None, Field(exclude_if=_is_none)]


class Answer(BaseModel):
    """Base of everything that is sent."""

    model_config = ConfigDict(frozen=True)


class PromptTokensDetails(Answer):
    """What `prompt_tokens` is made of."""

    cached_tokens: int


class Usage(Answer):
    """Tokens in and out. Each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ProposerFigures(Answer):
    """What one proposer did."""

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int


class SpeculativeDecoding(Answer):
    """What speculation did for one body, all choices together, over emitted tokens only."""

    mean_acceptance_length: float
    """Tokens per round that verified draft tokens, the replacement or bonus token included."""
    draft_acceptance_rate: float
    """Accepted / verified draft tokens; 0 when none was verified."""
    acceptance_histogram: list[int]
    """Entry i: rounds that accepted exactly i draft tokens."""
    num_spec_steps: int
    num_plain_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """K asked for."""
    num_recovered_tokens: int
    num_bonus_tokens: int
    num_plain_tokens: int
    num_late_proposals: int
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


class Metrics(Answer):
    """Figures of one request."""

    speculative_decoding: SpeculativeDecoding


class CompletionLogprobs(Answer):
    """Log-probabilities of `/v1/completions`; all lists run along the tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, which nothing comes before."""
    top_logprobs: list[dict[str, float] | None]
    """Empty when only the tokens themselves were asked for; null where `token_logprobs` is."""
    text_offset: list[int]
    """Characters of the choice's text before the token."""


class PromptLogprob(Answer):
    """A token in one place of the prompt."""

    logprob: float
    rank: int | None
    """1 for the most likely token; null for one that is not among those told."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per token of the prompt, {token id: its figures}: the prompt's own token and the most
likely ones. Null for the first, which nothing comes before."""


class CompletionChoice(Answer):
    """One choice, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: IfAsked[list[int]] = None
    token_origins: IfAsked[list[TokenOrigin]] = None
    prompt_logprobs: IfAsked[PromptLogprobs] = None


class Completion(Answer):
    """The answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: IfAsked[Metrics] = None


class TopLogprob(Answer):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """One emitted token and the likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of `/v1/chat/completions`."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessageAnswer(Answer):
    """What the assistant said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatDelta(Answer):
    """What is new of it."""

    role: IfAsked[Literal["assistant"]] = None
    content: IfAsked[str] = None


class ChatChoice(Answer):
    """One choice."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: IfAsked[list[int]] = None
    token_origins: IfAsked[list[TokenOrigin]] = None


class ChatChunkChoice(Answer):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: IfAsked[list[int]] = None
    token_origins: IfAsked[list[TokenOrigin]] = None


class ChatCompletion(Answer):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: IfAsked[Metrics] = None
    prompt_logprobs: IfAsked[PromptLogprobs] = None


class ChatCompletionChunk(Answer):
    """One chunk of its stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: IfAsked[Metrics] = None
    prompt_logprobs: IfAsked[PromptLogprobs] = None
    """On the first chunk alone."""
