"""Blocks as `/v1/chat/completions` answers them. Knows shapes; knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.gateway.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessageAnswer,
    Metrics,
    PromptLogprobs,
    Usage,
)
from specserve.gateway.blocks import Block
from specserve.gateway.formats import AnswerFormat, Wanted, ended
from specserve.gateway.plan import GenerationPlan
from specserve.gateway.token_text import TokenTexts


class ChatFormat(AnswerFormat[ChatChunkChoice]):
    """Writes chats."""

    def __init__(
        self, plan: GenerationPlan, created: int, wanted: Wanted, texts: TokenTexts
    ) -> None:
        super().__init__(plan, created, wanted)
        self._texts = texts
        self._opened: set[int] = set()  # choices whose role has been told
        self._prompt_told = False

    def chunk_choices(self, block: Block) -> list[ChatChunkChoice]:
        """Return the role, once per choice, and the block's text."""
        choices = []
        if block.index not in self._opened:
            self._opened.add(block.index)
            delta = ChatDelta(role="assistant", content="")
            choices.append(
                ChatChunkChoice(index=block.index, delta=delta, logprobs=None, finish_reason=None)
            )
        # A last chunk without text has an empty delta, as OpenAI's has.
        empty = not block.text and block.finish_reason is not None
        choices.append(
            ChatChunkChoice(
                index=block.index,
                delta=ChatDelta(content=None if empty else block.text),
                logprobs=self._logprobs(block),
                finish_reason=block.finish_reason,
                token_ids=self.token_ids(block),
                token_origins=self.token_origins(block),
                token_provenance=self.token_provenance(block),
            )
        )
        return choices

    def chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None, metrics: Metrics | None
    ) -> ChatCompletionChunk:
        """Return one chunk."""
        return ChatCompletionChunk(
            id=self.plan.request_id,
            created=self.created,
            model=self.plan.model,
            system_fingerprint=self.plan.system_fingerprint,
            choices=choices,
            usage=usage,
            metrics=metrics,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def whole(self, blocks: Sequence[Block], metrics: Metrics | None) -> ChatCompletion:
        """Return the whole answer."""
        return ChatCompletion(
            id=self.plan.request_id,
            created=self.created,
            model=self.plan.model,
            system_fingerprint=self.plan.system_fingerprint,
            choices=[
                ChatChoice(
                    index=block.index,
                    message=ChatMessageAnswer(content=block.text),
                    logprobs=self._logprobs(block),
                    finish_reason=ended(block),
                    token_ids=self.token_ids(block),
                    token_origins=self.token_origins(block),
                    token_provenance=self.token_provenance(block),
                )
                for block in blocks
            ],
            usage=self.tally.usage(),
            metrics=metrics,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """Return the prompt's log-probabilities, if asked for, once."""
        if not self.wanted.prompt_logprobs or self._prompt_told:
            return None
        self._prompt_told = True
        return self._texts.prompt_logprobs(
            self.plan.prompts[0].token_ids, self.gate.logprobs(0), self.wanted.num_prompt_logprobs
        )

    def _logprobs(self, block: Block) -> ChatLogprobs | None:
        return self._texts.chat_logprobs(block) if self.wanted.logprobs else None
