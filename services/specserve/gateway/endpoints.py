"""The two endpoints, put together from their bodies, prompts, plans and formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specserve.gateway.answering import Endpoint
from specserve.gateway.chat_format import ChatFormat
from specserve.gateway.completion_format import CompletionFormat
from specserve.gateway.config import GatewayConfig
from specserve.gateway.constraints import token_constraints
from specserve.gateway.fields import GenerationFields
from specserve.gateway.formats import Wanted
from specserve.gateway.off_loop import LONG_PLAN_IDS, in_thread_if
from specserve.gateway.pair import ServedPair
from specserve.gateway.plan import GenerationPlan, check_limits, check_model, make_plan
from specserve.gateway.prompt_view import plain_views, prompt_views
from specserve.gateway.prompts import chat_prompt, completion_prompts
from specserve.gateway.requests import ChatRequest, CompletionRequest
from specserve.gateway.structured import wanted_grammar
from specserve.gateway.tenants import Tenant
from specserve.gateway.token_text import TokenTexts
from specserve.grammar.compiler import GrammarCompiler

if TYPE_CHECKING:  # it brings the tokenizer library along, which a fake does not need
    from specserve.model.tokenizer import Tokenizer


def completion_endpoint(
    tokenizer: Tokenizer, config: GatewayConfig, texts: TokenTexts, grammars: GrammarCompiler
) -> Endpoint[CompletionRequest]:
    """Put `/v1/completions` together."""

    async def plan(
        request_id: str, body: CompletionRequest, pair: ServedPair, tenant: Tenant
    ) -> GenerationPlan:
        check_model(body.model, pair)
        check_limits(body, len(body.prompt), config)
        prompts = await completion_prompts(body, tokenizer, config.tokenize_in_thread_chars)
        grammar = await wanted_grammar(body, grammars, pair, tenant.salt)

        def put_together() -> GenerationPlan:
            constraints = token_constraints(body, tokenizer, grammar)
            views = prompt_views(body, prompts, texts)
            return make_plan(request_id, body, views, pair, config, constraints)

        return await in_thread_if(_is_long(body, prompts), put_together)

    def answer(plan: GenerationPlan, body: CompletionRequest, created: int) -> CompletionFormat:
        return CompletionFormat(plan, created, Wanted.of(body), texts)

    return Endpoint("text_completion", "cmpl", CompletionRequest, plan, answer)


def chat_endpoint(
    tokenizer: Tokenizer, config: GatewayConfig, texts: TokenTexts, grammars: GrammarCompiler
) -> Endpoint[ChatRequest]:
    """Put `/v1/chat/completions` together."""

    async def plan(
        request_id: str, body: ChatRequest, pair: ServedPair, tenant: Tenant
    ) -> GenerationPlan:
        check_model(body.model, pair)
        check_limits(body, 1, config)
        prompt = await chat_prompt(body, tokenizer, config.tokenize_in_thread_chars)
        grammar = await wanted_grammar(body, grammars, pair, tenant.salt)

        def put_together() -> GenerationPlan:
            constraints = token_constraints(body, tokenizer, grammar)
            return make_plan(request_id, body, plain_views([prompt]), pair, config, constraints)

        return await in_thread_if(_is_long(body, [prompt]), put_together)

    def answer(plan: GenerationPlan, body: ChatRequest, created: int) -> ChatFormat:
        return ChatFormat(plan, created, Wanted.of(body), texts)

    return Endpoint("chat", "chatcmpl", ChatRequest, plan, answer)


def _is_long(body: GenerationFields, prompts: Sequence[Sequence[int]]) -> bool:
    """Say whether a body names so many ids that a plan takes long."""
    return len(body.allowed_token_ids) + sum(map(len, prompts)) > LONG_PLAN_IDS
