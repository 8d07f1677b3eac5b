"""Gathers the text of a distillation: files made before, prompts answered, a corpus scored.

Knows files, the target's tokenizer and its generator; knows no student.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specserve.errors import ConfigurationError, ModelUnavailable
from specserve.model.hf_tokenizer import eos_token_ids
from specserve.tools.distill.generate import Generator
from specserve.tools.distill.prompts import GivenText, cut_corpus, read_given
from specserve.tools.distill.sample import (
    Prompt,
    SampleConfig,
    Template,
    TextMaker,
    chat_text,
    read_template,
)
from specserve.tools.distill.text import DistillText, join_texts, load_text


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Where the training text comes from; what is named is joined."""

    files: tuple[Path, ...] = ()
    """Texts made before (`.npz`)."""
    prompts: Path | None = None
    """User turns for the target to answer."""
    corpus: Path | None = None
    """Text for the target to score."""
    num_invented: int | None = None
    """Rows that the target asks itself; None: 4,608 where nothing else is named, else none."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """How it answers."""
    rows_at_once: int = 64
    """Rows of one forward while it answers."""


def gather_text(
    target: Path, config: TextConfig, path: Path, device: str, progress: Callable[[str], None]
) -> DistillText:
    """Load the texts named, and make and write to `path` what is still to be made.

    Raises:
        ModelUnavailable: a file is missing.
        ConfigurationError: a file does not hold what it should.
    """
    texts = []
    for file in config.files:
        if not file.is_file():
            raise ModelUnavailable(f"{file} is missing")
        texts.append(load_text(file))
    num_invented = config.num_invented
    if num_invented is None:
        alone = not (config.files or config.prompts or config.corpus)
        num_invented = SampleConfig().num_rows if alone else 0
    if num_invented or config.prompts or config.corpus:
        texts.append(_make_text(target, config, num_invented, path, device, progress))
    if not any(text.rows for text in texts):
        raise ConfigurationError("there is no text to train on")
    return join_texts(texts)


def _make_text(
    target: Path,
    config: TextConfig,
    num_invented: int,
    path: Path,
    device: str,
    progress: Callable[[str], None],
) -> DistillText:
    tokenizer = AutoTokenizer.from_pretrained(target)
    stop_ids = frozenset(eos_token_ids(target, tokenizer))
    # A base model has no template, and a corpus needs none.
    has_chats = bool(num_invented or config.prompts)
    template = read_template(tokenizer, stop_ids) if has_chats else Template([], [], stop_ids)
    sample = replace(config.sample, num_rows=num_invented)
    prompts = _prompts(config.prompts, tokenizer, template) if config.prompts else []
    stretches = (
        cut_corpus(tokenizer, read_given(config.corpus, ("text", "content")), sample.corpus_tokens)
        if config.corpus
        else []
    )
    asked = [len(prompt.token_ids) for prompt in prompts]
    if num_invented:
        asked.append(len(template.around(())) + sample.max_user_tokens)
    whole = [length + sample.max_answer_tokens for length in asked]
    longest = max([*whole, *map(len, stretches)])
    generator = Generator(target, template.stop_ids, config.rows_at_once, longest, device)
    maker = TextMaker(generator, path, sample, progress)
    maker.invent(template)
    maker.answer(prompts)
    maker.score(stretches)
    return maker.write()


def _prompts(path: Path, tokenizer: PreTrainedTokenizerBase, template: Template) -> list[Prompt]:
    given = read_given(path, ("prompt", "turns", "messages", "question"))
    return [
        Prompt(_prompt_ids(record, tokenizer, template), is_sampled=False, kind=record.kind)
        for record in given
    ]


def _prompt_ids(
    record: GivenText, tokenizer: PreTrainedTokenizerBase, template: Template
) -> tuple[int, ...]:
    if not record.system:
        return template.around(tokenizer.encode(record.text, add_special_tokens=False))
    turns = [("system", record.system), ("user", record.text)]
    text = chat_text(tokenizer, [{"role": role, "content": said} for role, said in turns])
    return tuple(tokenizer.encode(text, add_special_tokens=False))
