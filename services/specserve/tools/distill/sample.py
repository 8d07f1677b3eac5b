"""Samples training text from the target itself: a user turn, then its own answer.

Needs no data set: the chat template up to the user turn makes the target invent a question.
Where prompts are given, it answers those. Parts are kept, so sampling can be stopped. Knows a
generator and a tokenizer; knows no student.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specserve.errors import ConfigurationError
from specserve.tools.distill.generate import Generator, Question
from specserve.tools.distill.text import DistillText, Row, load_text, save_text

Progress = Callable[[str], None]
_MARK = "\x00user turn\x00"


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """How much is sampled, and how."""

    num_rows: int = 4608
    """Rows in all."""
    rows_per_part: int = 128
    """Rows saved as one resumable part."""
    max_user_tokens: int = 96
    """Longest user turn that the target invents."""
    max_answer_tokens: int = 224
    """Longest answer."""
    user_top_p: float = 0.98
    """Nucleus of an invented user turn, which is drawn at temperature 1."""
    greedy_share: float = 0.5
    """Share of answers that take the most likely id; the others are drawn at temperature 1."""
    ignore_stop_share: float = 0.0
    """Share of answers that go on behind their end, as requests with `ignore_eos` do."""
    corpus_tokens: int = 256
    """Tokens of one stretch of a corpus."""
    seed: int = 0
    """Seed of all draws."""


@dataclass(frozen=True, slots=True)
class Template:
    """The chat template cut at the user turn."""

    before_user: list[int]
    """Ids up to the user turn."""
    after_user: list[int]
    """Ids from the end of the user turn to the start of the answer."""
    stop_ids: frozenset[int]
    """Ids that end a turn."""

    def around(self, user: Sequence[int]) -> tuple[int, ...]:
        """Put a user turn between its ends."""
        return (*self.before_user, *user, *self.after_user)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to be answered."""

    token_ids: tuple[int, ...]
    """Template included."""
    is_sampled: bool
    """Whether the target wrote the user's words, too."""
    kind: str = ""
    """Its kind, for figures by kind."""


def read_template(tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int]) -> Template:
    """Cut the tokenizer's chat template around the user's words.

    Raises:
        ConfigurationError: it has none, or none that repeats the user's words as they are.
    """
    before, found, after = chat_text(tokenizer, [{"role": "user", "content": _MARK}]).partition(
        _MARK
    )
    if not found:
        raise ConfigurationError("the chat template changes a user's words: it cannot be cut there")
    return Template(
        before_user=list(tokenizer.encode(before, add_special_tokens=False)),
        after_user=list(tokenizer.encode(after, add_special_tokens=False)),
        stop_ids=stop_ids,
    )


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Render a conversation up to where the answer begins.

    Raises:
        ConfigurationError: the tokenizer has no chat template, or it refuses the messages.
    """
    try:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        text = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"the target's chat template: {text}; without one, --corpus or --text is what is left"
        ) from error


def user_turns(
    generator: Generator, template: Template, count: int, config: SampleConfig, seed: int
) -> list[Prompt]:
    """Let the target invent `count` prompts."""
    question = Question(
        prompt=tuple(template.before_user),
        max_tokens=config.max_user_tokens,
        is_greedy=False,
        top_p=config.user_top_p,
    )
    turns = generator.run([question] * count, seed)
    return [
        Prompt(
            template.around([i for i in turn.token_ids.tolist() if i not in template.stop_ids]),
            is_sampled=True,
        )
        for turn in turns
    ]


def answer_rows(
    generator: Generator,
    prompts: Sequence[Prompt],
    config: SampleConfig,
    first: int,
) -> DistillText:
    """Answer the prompts of rows `first` and on; the same for the same seed and `first`."""
    choices = np.random.default_rng([config.seed, first]).random((len(prompts), 2))
    greedy = choices[:, 0] < config.greedy_share
    ignoring = choices[:, 1] < config.ignore_stop_share
    questions = [
        Question(
            prompt=prompt.token_ids,
            max_tokens=config.max_answer_tokens,
            is_greedy=bool(is_greedy),
            ignore_stop=bool(ignore),
        )
        for prompt, is_greedy, ignore in zip(prompts, greedy, ignoring, strict=True)
    ]
    answers = generator.run(questions, config.seed * 1_000_003 + first)
    return DistillText(
        tuple(
            Row(
                prompt=np.array(prompt.token_ids, np.int64),
                answer=answer.token_ids,
                top_ids=answer.top_ids,
                top_logprobs=answer.top_logprobs,
                is_greedy=question.is_greedy,
                is_prompt_sampled=prompt.is_sampled,
                kind=prompt.kind,
            )
            for prompt, question, answer in zip(prompts, questions, answers, strict=True)
        )
    )


def score_rows(generator: Generator, stretches: Sequence[tuple[int, ...]]) -> DistillText:
    """Score stretches of a corpus: its first token is the prompt, the others are the answer."""
    rows = []
    for ids in stretches:
        answer = generator.score(ids[:1], ids[1:])
        rows.append(
            Row(
                prompt=np.array(ids[:1], np.int64),
                answer=answer.token_ids,
                top_ids=answer.top_ids,
                top_logprobs=answer.top_logprobs,
                is_greedy=False,
                is_prompt_sampled=False,
                kind="corpus",
            )
        )
    return DistillText(tuple(rows))


class TextMaker:
    """Makes a text part by part; parts that lie beside its file are used again."""

    def __init__(
        self, generator: Generator, path: Path, config: SampleConfig, progress: Progress
    ) -> None:
        self._generator, self._path, self._config = generator, path, config
        self._progress = progress
        self._parts = path.with_name(path.name + ".parts")
        self._rows: list[Row] = []
        how = replace(config, num_rows=0, rows_per_part=0)
        self._origin = f"{generator.fingerprint} {sorted(generator.stop_ids)} {how}"
        """What decides the answers to a prompt."""

    def invent(self, template: Template) -> None:
        """Let the target ask and answer itself `num_rows` times."""
        config = self._config

        def make(first: int, count: int) -> DistillText:
            asked = user_turns(
                self._generator, template, count, config, config.seed * 1_000_003 + first
            )
            return answer_rows(self._generator, asked, config, first)

        self._make("invented", (template.before_user, template.after_user), config.num_rows, make)

    def answer(self, prompts: Sequence[Prompt]) -> None:
        """Answer given prompts, one row each."""
        self._make(
            "prompts",
            [p.token_ids for p in prompts],
            len(prompts),
            lambda first, count: answer_rows(
                self._generator, prompts[first : first + count], self._config, first
            ),
        )

    def score(self, stretches: Sequence[tuple[int, ...]]) -> None:
        """Score stretches of a corpus, one row each."""
        self._make(
            "corpus",
            stretches,
            len(stretches),
            lambda first, count: score_rows(self._generator, stretches[first : first + count]),
        )

    def write(self) -> DistillText:
        """Write all rows made so far as one file, and return them."""
        text = DistillText(tuple(self._rows))
        save_text(self._path, text)
        return text

    def _make(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        num_rows: int,
        make: Callable[[int, int], DistillText],
    ) -> None:
        # Parts of other prompts, another model or other settings are not taken for its own.
        text = json.dumps([self._origin, prompts]).encode()
        digest = hashlib.sha256(text).hexdigest()[:12]
        self._parts.mkdir(parents=True, exist_ok=True)
        for first in range(0, num_rows, self._config.rows_per_part):
            count = min(self._config.rows_per_part, num_rows - first)
            part = self._parts / f"{name}-{digest}-row{first:07d}-{count}.npz"
            if not part.exists():
                save_text(part, make(first, count))
            self._rows.extend(load_text(part).rows)
            self._progress(f"{first + count}/{num_rows} rows of {self._path.name}")
