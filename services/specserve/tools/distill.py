"""`specserve distill`: train a small draft from a target's own text, and pack it.

Joins text, student, training and the output directory. Knows files and the command line;
the recipe is in `distill_recipe.py`.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from specserve.errors import ConfigurationError, ModelUnavailable
from specserve.model.draft_package import RECIPE_FILE, VOCAB_FILE, sha256_of, write_package
from specserve.model.model_folder import read_marker
from specserve.tools.distill_evaluate import validate_folder
from specserve.tools.distill_recipe import CurvePoint, TrainConfig
from specserve.tools.distill_sample import SampleConfig, read_template, sample_text
from specserve.tools.distill_student import init_student
from specserve.tools.distill_text import DistillText, load_text
from specserve.tools.distill_train import Trainer

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """One distillation."""

    target: Path
    """Hugging Face directory of the target (Llama architecture, tied embeddings)."""
    output: Path
    """Directory of the draft; checkpoints are kept beside it."""
    text: Path | None = None
    """Sampled text (`.npz`); None: sample it from the target."""
    layers: tuple[int, ...] = (0, 1, 29)
    """Target layers the student starts from."""
    draft_vocab_size: int = 12288
    """Most frequent ids the head is trained and cut to; special ids come on top."""
    num_threads: int = 2
    """Processor threads; another number may change the last bits of the weights."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The recipe."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """What is sampled when there is no text."""


@dataclass(frozen=True, slots=True)
class DistillReport:
    """What a distillation made."""

    output: Path
    """The draft's directory."""
    num_steps: int
    """Optimiser steps."""
    draft_vocab_size: int
    """Ids in `draft_vocab.json`."""
    curve: tuple[CurvePoint, ...]
    """Validation by step; the last one is of the weights written."""


def distill(config: DistillConfig, progress: Callable[[str], None]) -> DistillReport:
    """Train a draft; resume where an interrupted call with the same `output` stopped.

    Raises:
        ModelUnavailable: the target or the text is missing.
    """
    for path in (config.target / "config.json", config.text):
        if path is not None and not path.is_file():
            raise ModelUnavailable(f"{path} is missing")
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.train.seed)
    target = LlamaForCausalLM.from_pretrained(config.target, dtype=torch.bfloat16)
    if max(config.layers) >= target.config.num_hidden_layers:
        raise ModelUnavailable(
            f"layers {config.layers} asked for, {config.target} has "
            f"{target.config.num_hidden_layers}"
        )
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    text_path = config.text or config.output.with_name(config.output.name + ".text.npz")
    if text_path.is_file():
        text = load_text(text_path)
    else:
        stops = frozenset({int(tokenizer.eos_token_id)})
        template = read_template(tokenizer, stops)
        text = sample_text(target, template, text_path, config.sample, progress)
    special = tuple(sorted(int(token_id) for token_id in tokenizer.all_special_ids))
    added = tuple(sorted(int(i) for i, t in tokenizer.added_tokens_decoder.items() if t.special))
    vocab = text.frequent_token_ids(config.draft_vocab_size, (*special, *added))
    student = init_student(target, config.layers)
    del target
    checkpoint = config.output.with_name(config.output.name + ".checkpoint.pt")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(student, text, vocab, config.train, checkpoint, progress)
    if trainer.resume():
        progress(f"resumed at step {trainer.step}")
    curve = trainer.train()
    recipe = _recipe(config, text, text_path, trainer)
    _write_student(config, student, vocab, recipe)
    return DistillReport(config.output, trainer.step, len(vocab), curve)


def _recipe(
    config: DistillConfig, text: DistillText, text_path: Path, trainer: Trainer
) -> dict[str, object]:
    marker = read_marker(config.target)
    return {
        "target": marker.source if marker else config.target.name,
        "text_sha256": sha256_of(text_path),
        "num_rows": len(text.rows),
        "num_answer_tokens": text.num_answer_tokens,
        "num_held_out_rows": len(trainer.held_rows),
        "layers": list(config.layers),
        "train": asdict(config.train),
        "num_threads": config.num_threads,
        "torch": str(torch.__version__),
        "curve": [asdict(point) for point in trainer.curve],
    }


def _write_student(
    config: DistillConfig,
    student: LlamaForCausalLM,
    vocab: tuple[int, ...],
    recipe: dict[str, object],
) -> None:
    """Write a plain Hugging Face directory, bfloat16, with the target's tokenizer."""
    config.output.mkdir(parents=True, exist_ok=True)
    student.bfloat16()
    student.config.dtype = torch.bfloat16
    student.set_attn_implementation("eager")  # not ours: the name is unknown elsewhere
    student.save_pretrained(config.output)
    for name in _COPIED:
        if (config.target / name).is_file():
            shutil.copyfile(config.target / name, config.output / name)
    (config.output / VOCAB_FILE).write_text(json.dumps({"token_ids": list(vocab)}) + "\n")
    (config.output / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve distill`."""
    parser.add_argument("target", type=Path, help="Hugging Face directory of the target")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="directory of the draft to be made")
    what.add_argument("--validate", type=Path, help="measure this draft on --text, train nothing")
    parser.add_argument("--text", type=Path, help="sampled text (.npz); default: sample it")
    parser.add_argument("--num-rows", type=int, default=SampleConfig().num_rows)
    parser.add_argument("--layers", default="0,1,29", help="target layers to start from")
    parser.add_argument("--draft-vocab-size", type=int, default=12288)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--pack", type=Path, help="also write PACK.safetensors and PACK.json")
    for number in fields(TrainConfig):
        default = getattr(TrainConfig(), number.name)
        flag = "--" + number.name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default)


def run(args: argparse.Namespace) -> int:
    """Run `specserve distill`; progress goes to standard output, one line at a time."""

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    if args.validate is not None:
        if args.text is None:
            raise ConfigurationError("--validate needs --text: the rows to measure on")
        write(str(validate_folder(args.validate, load_text(args.text), args.held_out_every)))
        return 0
    config = DistillConfig(
        target=args.target,
        output=args.output,
        text=args.text,
        layers=tuple(int(layer) for layer in args.layers.split(",")),
        draft_vocab_size=args.draft_vocab_size,
        num_threads=args.num_threads,
        train=TrainConfig(**{f.name: getattr(args, f.name) for f in fields(TrainConfig)}),
        sample=SampleConfig(num_rows=args.num_rows, seed=args.seed),
    )
    report = distill(config, write)
    write(f"{report.num_steps} steps; draft in {report.output}")
    if args.pack is not None:
        package = write_package(report.output, args.pack)
        write(f"packed {args.pack}.safetensors sha256 {package.weights_sha256}")
    return 0
