"""Answers many prompts with a target at once, with its most likely ids at every position.

The engine's runner, each row with blocks of its own: a row that has finished takes the next
prompt, and takes over the keys of a prompt that began alike. Knows a
model and token ids; knows no tokenizer, no file and no student.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from specserve.config import DType, EngineConfig
from specserve.errors import ConfigurationError
from specserve.model.hf_runner import HuggingFaceRunner
from specserve.model.loading import resolve_device, resolve_dtype
from specserve.model.runner import SequenceSlice
from specserve.tools.distill.draws import draw, most_likely
from specserve.tools.distill.text import FloatArray, IntArray

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and how it is to be answered."""

    prompt: tuple[int, ...]
    """Token ids."""
    max_tokens: int
    """Longest answer."""
    is_greedy: bool
    """Take the most likely id; else draw at temperature 1."""
    top_p: float = 1.0
    """Nucleus of a drawn answer."""
    ignore_stop: bool = False
    """Go on after a stop id, as a request with `ignore_eos` does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came after a prompt."""

    token_ids: IntArray
    """[n] ids, a stop id included."""
    top_ids: IntArray
    """[n, k] the most likely ids at each position."""
    top_logprobs: FloatArray
    """[n, k] their log-probabilities at temperature 1, at least -30."""


@dataclass(slots=True)
class _Row:
    """A row of the batch."""

    number: int
    question: Question
    place: int
    """Its row of the cache."""
    answer: list[int] = field(default_factory=list)
    top_ids: list[IntArray] = field(default_factory=list)
    top_logprobs: list[FloatArray] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens whose keys are held: all but the newest."""
        return len(self.question.prompt) + len(self.answer) - 1


class Generator:
    """Runs questions through a target, `num_rows` at a time."""

    def __init__(
        self,
        target: Path,
        stop_ids: frozenset[int],
        num_rows: int = 64,
        longest: int = 1024,
        device: str = "cpu",
        dtype: DType = "auto",
    ) -> None:
        """Load the target with room for `num_rows` sequences of `longest` tokens.

        Raises:
            ModelUnavailable: files are missing or damaged.
            ConfigurationError: the model cannot be served.
        """
        place = resolve_device(device)
        config = EngineConfig(
            model=str(target),
            device=device,
            block_size=_BLOCK_SIZE,
            num_kv_blocks=num_rows * -(-longest // _BLOCK_SIZE),
            max_model_len=longest,
            num_threads=torch.get_num_threads(),
        )
        vocab_size = AutoConfig.from_pretrained(target).get_text_config().vocab_size
        self._runner = HuggingFaceRunner.load(
            config, target, vocab_size, resolve_dtype(dtype, place), place
        )
        blocks = range(self._runner.info.num_blocks)
        per_row = len(blocks) // num_rows
        self._tables = [blocks[i * per_row : (i + 1) * per_row] for i in range(num_rows)]
        self._longest = longest
        self._held: list[tuple[int, ...]] = [()] * num_rows
        self.stop_ids = stop_ids
        """Ids that end an answer."""
        self.fingerprint = self._runner.info.weights_fingerprint
        """Of the target's weights."""
        self._random = torch.Generator().manual_seed(0)
        self.num_generated = 0
        """Answer tokens so far."""

    @torch.inference_mode()
    def run(self, questions: Sequence[Question], seed: int) -> list[Answer]:
        """Answer all questions; the same for the same seed, questions and machine."""
        self._random.manual_seed(seed)
        self._held = [()] * len(self._tables)
        for question in questions:
            size = len(question.prompt) + question.max_tokens
            if not question.prompt or question.max_tokens < 1 or size > self._longest:
                raise ConfigurationError(
                    f"a prompt of {len(question.prompt)} tokens and an answer of "
                    f"{question.max_tokens}: at most {self._longest} together"
                )
        # A long answer started last would run alone.
        waiting = list(enumerate(questions))[::-1]
        free = list(range(len(self._tables)))[::-1]
        active: list[_Row] = []
        answers: dict[int, Answer] = {}
        while waiting or active:
            while waiting and free:
                number, question = waiting.pop()
                row = _Row(number, question, free.pop())
                self._take([row], self._prefill(row))
                active.append(row)
            ended = [row for row in active if self._is_done(row)]
            active = [row for row in active if not self._is_done(row)]
            for row in ended:
                answers[row.number] = _answer(row)
                free.append(row.place)
            if active and not (waiting and free):
                self._take(active, self._decode(active))
        return [answers[number] for number in range(len(questions))]

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], given: Sequence[int]) -> Answer:
        """Return what the target would have said at each position of a given continuation."""
        if len(prompt) + len(given) > self._longest:
            raise ConfigurationError(
                f"{len(prompt) + len(given)} tokens to score: at most {self._longest} at once"
            )
        self._held[0] = ()
        ids = [*prompt, *given][:-1]
        logits = self._runner.forward([SequenceSlice(ids, 0, self._tables[0], len(given))])
        columns, logprobs = most_likely(logits)
        return Answer(np.array(given, np.int64), columns.cpu().numpy(), logprobs.cpu().numpy())

    def _prefill(self, row: _Row) -> Tensor:
        """Compute a prompt, less what another row's prompt shares with it; [1, V] logits."""
        prompt, table = row.question.prompt, self._tables[row.place]
        shared, source = max((_shared(prompt, other), i) for i, other in enumerate(self._held))
        held = min(shared, len(prompt) - 1) // _BLOCK_SIZE * _BLOCK_SIZE
        if source != row.place:
            for block in range(held // _BLOCK_SIZE):
                self._runner.copy_block(self._tables[source][block], table[block])
        self._held[row.place] = prompt
        return self._runner.forward([SequenceSlice(prompt[held:], held, table, 1)])

    def _decode(self, active: list[_Row]) -> Tensor:
        """Compute every row's newest token; [rows, V] logits."""
        return self._runner.forward(
            [
                SequenceSlice(row.answer[-1:], row.length, self._tables[row.place], 1)
                for row in active
            ]
        )

    def _take(self, active: list[_Row], logits: Tensor) -> None:
        """Choose every row's next id."""
        columns, logprobs = most_likely(logits)
        chosen = columns[:, 0].tolist()
        drawn = [i for i, row in enumerate(active) if not row.question.is_greedy]
        if drawn:
            top_p = torch.tensor([active[i].question.top_p for i in drawn])
            probs = logits[drawn].softmax(-1).cpu()
            uniforms = torch.rand(len(drawn), generator=self._random)
            for i, column in zip(drawn, draw(probs, top_p, uniforms).tolist(), strict=True):
                chosen[i] = column
        top_ids, top_logprobs = columns.cpu().numpy(), logprobs.cpu().numpy()
        for i, row in enumerate(active):
            row.answer.append(chosen[i])
            row.top_ids.append(top_ids[i])
            row.top_logprobs.append(top_logprobs[i])
        self.num_generated += len(active)

    def _is_done(self, row: _Row) -> bool:
        question = row.question
        if len(row.answer) >= question.max_tokens:
            return True
        return not question.ignore_stop and row.answer[-1] in self.stop_ids


def _answer(row: _Row) -> Answer:
    return Answer(np.array(row.answer, np.int64), np.stack(row.top_ids), np.stack(row.top_logprobs))


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Count the leading ids that two prompts share."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
