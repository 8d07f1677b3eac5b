"""Blocks as `/v1/completions` answers them. Knows shapes; knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.gateway.answers import Completion, CompletionChoice, Metrics, Usage
from specserve.gateway.blocks import Block
from specserve.gateway.detokenizer import IncrementalText
from specserve.gateway.formats import AnswerFormat, Wanted
from specserve.gateway.plan import GenerationPlan
from specserve.gateway.token_text import TokenTexts


class CompletionFormat(AnswerFormat[CompletionChoice]):
    """Writes completions."""

    def __init__(
        self, plan: GenerationPlan, created: int, wanted: Wanted, texts: TokenTexts
    ) -> None:
        super().__init__(plan, created, wanted)
        self._texts = texts
        self._positions = [IncrementalText() for _ in plan.choices]

    def chunk_choices(self, block: Block) -> list[CompletionChoice]:
        """Return the block as one choice."""
        logprobs = None
        if self.wanted.logprobs:
            logprobs = self._texts.completion_logprobs(
                block, self._positions[block.index], not self.wanted.special_tokens
            )
        return [
            CompletionChoice(
                index=block.index,
                text=block.text,
                logprobs=logprobs,
                finish_reason=block.finish_reason,
                token_ids=self.token_ids(block),
                token_origins=self.token_origins(block),
            )
        ]

    def chunk(
        self, choices: list[CompletionChoice], usage: Usage | None, metrics: Metrics | None
    ) -> Completion:
        """Return one chunk; its shape is the whole answer's."""
        return Completion(
            id=self.plan.request_id,
            created=self.created,
            model=self.plan.model,
            system_fingerprint=self.plan.system_fingerprint,
            choices=choices,
            usage=usage,
            metrics=metrics,
        )

    def whole(self, blocks: Sequence[Block], metrics: Metrics | None) -> Completion:
        """Return the whole answer."""
        choices = [choice for block in blocks for choice in self.chunk_choices(block)]
        return self.chunk(choices, self.tally.usage(), metrics)
