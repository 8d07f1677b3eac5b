"""Blocks as the answers of one body: what both endpoints share.

Knows what was asked for and the shapes of answers; knows no HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from specserve.gateway.answers import Answer, Metrics, TokenProvenance, Usage
from specserve.gateway.blocks import Block, FinishReason, TokenOrigin
from specserve.gateway.off_loop import LONG_ANSWER_ENTRIES
from specserve.gateway.plan import GenerationPlan
from specserve.gateway.prompt_gate import PromptGate
from specserve.gateway.provenance import provenance_of
from specserve.gateway.requests import ChatRequest, CompletionRequest
from specserve.gateway.tally import Tally
from specserve.gateway.wanted_logprobs import wanted_logprobs

ChoiceT = TypeVar("ChoiceT", bound=Answer)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client asked to see besides text."""

    token_ids: bool
    """`choices[].token_ids`."""
    num_logprobs: int
    """Top entries of `choices[].logprobs`; -1 shows none."""
    echo: bool
    """The prompt before the text of each choice."""
    num_prompt_logprobs: int
    """Top entries of `prompt_logprobs`; -1 shows none."""
    usage: bool
    """A last chunk with the usage; the field is null on the others."""
    usage_in_every_chunk: bool
    """The usage so far on every chunk."""
    special_tokens: bool
    """Special tokens are part of the text."""
    metrics: bool
    """`metrics.speculative_decoding`."""
    detailed_metrics: bool
    """Its steps too, and `choices[].token_origins`."""

    @property
    def logprobs(self) -> bool:
        """Whether `choices[].logprobs` is shown."""
        return self.num_logprobs >= 0

    @property
    def prompt_logprobs(self) -> bool:
        """Whether `prompt_logprobs` is shown."""
        return self.num_prompt_logprobs >= 0

    @property
    def entries_per_token(self) -> int:
        """How many figures are written for each token of the output, roughly."""
        return 1 + (self.num_logprobs + 1) + (4 if self.detailed_metrics else 0)

    @classmethod
    def of(cls, body: CompletionRequest | ChatRequest) -> Wanted:
        """Read a body."""
        options = body.stream_options
        return cls(
            token_ids=body.return_token_ids,
            num_logprobs=wanted_logprobs(body),
            echo=isinstance(body, CompletionRequest) and body.echo,
            num_prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
            usage=options is not None and options.include_usage,
            usage_in_every_chunk=options is not None and options.continuous_usage_stats,
            special_tokens=not body.skip_special_tokens,
            metrics=body.speculation_metrics != "none",
            detailed_metrics=body.speculation_metrics == "detailed",
        )


class AnswerFormat(ABC, Generic[ChoiceT]):
    """Writes one body's answer, whole or as the chunks of a stream."""

    def __init__(self, plan: GenerationPlan, created: int, wanted: Wanted) -> None:
        self.plan = plan
        self.created = created
        self.wanted = wanted
        self.tally = Tally(plan.prompt_lengths, plan.n)
        self.gate = PromptGate(plan)

    @abstractmethod
    def chunk_choices(self, block: Block) -> list[ChoiceT]:
        """Return what one block adds to its choice, each for a chunk of its own."""

    @abstractmethod
    def chunk(self, choices: list[ChoiceT], usage: Usage | None, metrics: Metrics | None) -> Answer:
        """Return one chunk."""

    @abstractmethod
    def whole(self, blocks: Sequence[Block], metrics: Metrics | None) -> Answer:
        """Return the whole answer; one block per choice, in order of their numbers."""

    def is_long(self, blocks: Sequence[Block]) -> bool:
        """Say whether blocks take so long to write that other requests would wait for it."""
        num_tokens = sum(len(block.token_ids) for block in blocks)
        num_entries = num_tokens * self.wanted.entries_per_token
        return self.plan.scores_prompts or num_entries > LONG_ANSWER_ENTRIES

    def on_block(self, block: Block) -> list[bytes]:
        """Write the chunks of one block, and of those that waited for it."""
        return [chunk for shown in self.gate.take(block) for chunk in self._chunks(shown)]

    def _chunks(self, block: Block) -> list[bytes]:
        """Write the chunks of one block; none while a block brings nothing that was asked for."""
        before = self._usage_so_far()
        self.tally.add(block)
        if not (block.text or block.finish_reason or (block.token_ids and self._shows_tokens)):
            return []
        *openings, choice = self.chunk_choices(block)
        # A role or a prompt is told apart, and holds none of the block's tokens.
        return [
            *(self._write(self.chunk([opening], before, None)) for opening in openings),
            self._write(self.chunk([choice], self._usage_so_far(), None)),
        ]

    def _usage_so_far(self) -> Usage | None:
        return self.tally.usage() if self.wanted.usage_in_every_chunk else None

    def at_end(self) -> list[bytes]:
        """Write what follows the last block."""
        if not (self.wanted.usage or self.wanted.metrics):
            return []
        usage = self.tally.usage() if self.wanted.usage else None
        return [self._write(self.chunk([], usage, self._metrics()))]

    def answer(self, blocks: Sequence[Block]) -> bytes:
        """Write the whole answer from all blocks, in whichever order they came."""
        parts: list[list[Block]] = [[] for _ in self.plan.choices]
        for block in blocks:
            self.gate.take(block)
            self.tally.add(block)
            parts[block.index].append(block)
        merged = [merge(of_one) for of_one in parts]
        return self.whole(merged, self._metrics()).model_dump_json().encode()

    def token_ids(self, block: Block) -> list[int] | None:
        """Return the block's token ids, if asked for."""
        return list(block.token_ids) if self.wanted.token_ids else None

    def token_origins(self, block: Block) -> list[TokenOrigin] | None:
        """Return where the block's tokens came from, if asked for."""
        return list(block.origins) if self.wanted.detailed_metrics else None

    def token_provenance(self, block: Block) -> list[TokenProvenance] | None:
        """Return all that is known of where they came from, if asked for."""
        if not self.wanted.detailed_metrics:
            return None
        return list(provenance_of(block.provenance, block.origins, block.rounds))

    @property
    def _shows_tokens(self) -> bool:
        wanted = self.wanted
        return (
            wanted.token_ids
            or wanted.logprobs
            or wanted.detailed_metrics
            or wanted.usage_in_every_chunk
        )

    def _metrics(self) -> Metrics | None:
        return self.tally.metrics(self.wanted.detailed_metrics) if self.wanted.metrics else None

    def _write(self, chunk: Answer) -> bytes:
        shows_usage = self.wanted.usage or self.wanted.usage_in_every_chunk
        return chunk.model_dump_json(exclude=None if shows_usage else {"usage"}).encode()


def merge(blocks: Sequence[Block]) -> Block:
    """Join the blocks of one choice; the last one has its end."""
    last = blocks[-1]
    return Block(
        index=last.index,
        text="".join(block.text for block in blocks),
        token_ids=tuple(item for block in blocks for item in block.token_ids),
        logprobs=tuple(item for block in blocks for item in block.logprobs),
        origins=tuple(item for block in blocks for item in block.origins),
        rounds=tuple(item for block in blocks for item in block.rounds),
        provenance=tuple(item for block in blocks for item in block.provenance),
        finish_reason=last.finish_reason,
        record=last.record,
    )


def ended(block: Block) -> FinishReason:
    """Return why a whole choice ended."""
    if block.finish_reason is None:
        raise ValueError(f"choice {block.index} has not ended")
    return block.finish_reason
