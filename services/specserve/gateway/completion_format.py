"""Blocks as `/v1/completions` answers them. Knows shapes; knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.gateway.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Metrics,
    PromptLogprobs,
    Usage,
)
from specserve.gateway.blocks import Block
from specserve.gateway.detokenizer import IncrementalText
from specserve.gateway.formats import AnswerFormat, Wanted
from specserve.gateway.plan import GenerationPlan
from specserve.gateway.token_text import TokenTexts


@dataclass(frozen=True, slots=True)
class _PromptFigures:
    """What the choices of one prompt have in common, made once: it may be millions of values."""

    logprobs: CompletionLogprobs | None
    """Of the echo."""
    end: IncrementalText
    """Where the echo ends and each choice goes on."""
    scores: PromptLogprobs | None
    """Of the field `prompt_logprobs`."""


class CompletionFormat(AnswerFormat[CompletionChoice]):
    """Writes completions."""

    def __init__(
        self, plan: GenerationPlan, created: int, wanted: Wanted, texts: TokenTexts
    ) -> None:
        super().__init__(plan, created, wanted)
        self._texts = texts
        self._positions = [IncrementalText() for _ in plan.choices]
        self._opened: set[int] = set()  # choices whose prompt has been told
        self._figures: dict[int, _PromptFigures] = {}  # {prompt: its figures}

    def chunk_choices(self, block: Block) -> list[CompletionChoice]:
        """Return the prompt, once per choice and if it is to be shown, and the block."""
        prompt = self._prompt_choice(block.index)
        return [self._choice(block)] if prompt is None else [prompt, self._choice(block)]

    def _choice(self, block: Block) -> CompletionChoice:
        logprobs = None
        if self.wanted.logprobs:
            logprobs = self._texts.completion_logprobs(
                block, self._positions[block.index], not self.wanted.special_tokens
            )
        return CompletionChoice(
            index=block.index,
            text=block.text,
            logprobs=logprobs,
            finish_reason=block.finish_reason,
            token_ids=self.token_ids(block),
            token_origins=self.token_origins(block),
            token_provenance=self.token_provenance(block),
        )

    def _prompt_choice(self, index: int) -> CompletionChoice | None:
        """Return what of its prompt a choice begins with; None when that has been told."""
        wanted = self.wanted
        if index in self._opened or not (wanted.echo or wanted.prompt_logprobs):
            return None
        self._opened.add(index)
        number = index // self.plan.n
        if number not in self._figures:
            self._figures[number] = self._prompt_figures(number)
        figures = self._figures[number]
        self._positions[index] = figures.end.copy()
        choice = CompletionChoice(
            index=index,
            text=self.plan.prompts[number].text,
            logprobs=figures.logprobs,
            finish_reason=None,
            token_ids=[] if wanted.token_ids else None,
            token_origins=[] if wanted.detailed_metrics else None,
            token_provenance=[] if wanted.detailed_metrics else None,
        )
        # Not as an argument, which would be checked, and so copied, for each choice.
        return choice.model_copy(update={"prompt_logprobs": figures.scores})

    def _prompt_figures(self, number: int) -> _PromptFigures:
        wanted, prompt, entries = self.wanted, self.plan.prompts[number], self.gate.logprobs(number)
        logprobs, end, scores = None, IncrementalText(), None
        if wanted.echo and wanted.logprobs:
            logprobs = self._texts.echoed_logprobs(
                prompt, entries, wanted.num_logprobs, end, not wanted.special_tokens
            )
        if wanted.prompt_logprobs:
            scores = self._texts.prompt_logprobs(
                prompt.token_ids, entries, wanted.num_prompt_logprobs
            )
        return _PromptFigures(logprobs, end, scores)

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
        choices = [_joined(self.chunk_choices(block)) for block in blocks]
        return self.chunk(choices, self.tally.usage(), metrics)


def _joined(parts: Sequence[CompletionChoice]) -> CompletionChoice:
    """Join a prompt and what follows it."""
    if len(parts) == 1:
        return parts[0]
    prompt, rest = parts
    told = (prompt.logprobs, rest.logprobs)
    return rest.model_copy(
        update={
            "text": prompt.text + rest.text,
            "logprobs": _joined_logprobs(*told) if told[0] is not None else told[1],
            "prompt_logprobs": prompt.prompt_logprobs,
        }
    )


def _joined_logprobs(
    first: CompletionLogprobs | None, second: CompletionLogprobs | None
) -> CompletionLogprobs:
    parts = [part for part in (first, second) if part is not None]
    # Unchecked: a check would copy what a prompt's choices share.
    return CompletionLogprobs.model_construct(
        tokens=[item for part in parts for item in part.tokens],
        token_logprobs=[item for part in parts for item in part.token_logprobs],
        top_logprobs=[item for part in parts for item in part.top_logprobs],
        text_offset=[item for part in parts for item in part.text_offset],
    )
