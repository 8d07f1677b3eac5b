"""`specserve distill`: train a small draft from a target's own text, and pack it.

Joins text, student, training and the output directory. Knows files; the flags are in
`flags.py`, the recipe's numbers in `recipe.py`.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from specserve.errors import ConfigurationError, ModelUnavailable
from specserve.model.draft_package import RECIPE_FILE, VOCAB_FILE, WEIGHTS_FILE, sha256_of
from specserve.model.loading import resolve_device
from specserve.model.model_folder import read_marker
from specserve.tools.distill.gather import TextConfig, gather_text
from specserve.tools.distill.recipe import CurvePoint, TrainConfig
from specserve.tools.distill.student import (
    ScratchShape,
    init_student,
    load_student,
    scratch_student,
)
from specserve.tools.distill.text import DistillText
from specserve.tools.distill.train import Trainer

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
    text: TextConfig = field(default_factory=TextConfig)
    """What is trained on."""
    layers: tuple[int, ...] | None = None
    """Target layers the student starts from; None: the first two and the last."""
    scratch: ScratchShape | None = None
    """A small student with random weights in their place."""
    start_from: Path | None = None
    """A draft of the same target, distilled before, to go on with in their place."""
    draft_vocab_size: int = 12288
    """Most frequent ids the head is trained and cut to; special ids come on top."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:N` or `auto`."""
    num_threads: int = 2
    """Processor threads; another number may change the last bits of the weights."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The recipe."""


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


def load_target(config: DistillConfig) -> LlamaForCausalLM:
    """Load the target to take layers from.

    Raises:
        ModelUnavailable: it is missing.
        ConfigurationError: it is of a family that is not distilled.
    """
    if not (config.target / "config.json").is_file():
        raise ModelUnavailable(f"{config.target / 'config.json'} is missing")
    kind = AutoConfig.from_pretrained(config.target).model_type
    if kind != "llama":
        raise ConfigurationError(f"{config.target} is a {kind} model; only llama can be distilled")
    target = LlamaForCausalLM.from_pretrained(config.target, dtype=torch.bfloat16)
    return target


def layers_of(config: DistillConfig, target: LlamaForCausalLM) -> tuple[int, ...]:
    """Return the layers to take.

    Raises:
        ConfigurationError: the target does not have them.
    """
    count = target.config.num_hidden_layers
    if config.layers is None:
        return tuple(sorted({0, min(1, count - 1), count - 1}))
    if not config.layers or not all(0 <= layer < count for layer in config.layers):
        raise ConfigurationError(
            f"--layers {','.join(map(str, config.layers))}: {config.target} has 0 to {count - 1}"
        )
    return config.layers


def distill(config: DistillConfig, progress: Callable[[str], None]) -> DistillReport:
    """Train a draft; resume where an interrupted call with the same `output` stopped.

    Raises:
        ModelUnavailable: the target or a text is missing.
        ConfigurationError: target, text and flags do not fit.
    """
    device = resolve_device(config.device)
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.train.seed)
    target = load_target(config)
    layers: tuple[int, ...] = ()
    if config.start_from is not None:
        student = load_student(config.start_from, target)
    elif config.scratch is not None:
        student = scratch_student(target, config.scratch, config.train.seed)
    else:
        layers = layers_of(config, target)
        student = init_student(target, layers)
    del target
    student.to(device)  # type: ignore[arg-type] # transformers wraps it without its types
    text_path = config.output.with_name(config.output.name + ".text.npz")
    text_path.parent.mkdir(parents=True, exist_ok=True)
    text = gather_text(config.target, config.text, text_path, config.device, progress)
    special = special_ids(config.target)
    vocab = text.frequent_token_ids(config.draft_vocab_size, special)
    checkpoint = config.output.with_name(config.output.name + ".checkpoint.pt")
    trainer = Trainer(student, text, vocab, config.train, checkpoint, progress)
    progress(
        f"{len(trainer.train_rows)} rows to train on, {len(trainer.held_rows)} held out, "
        f"{trainer.num_left_out} left out that begin like one of these"
    )
    if trainer.resume():
        progress(f"resumed at step {trainer.step}")
    curve = trainer.train()
    ranked = text.ranked(vocab, special)
    _write_student(config, student, ranked, _recipe(config, layers, text, text_path, trainer))
    return DistillReport(config.output, trainer.step, len(vocab), curve)


def special_ids(target: Path) -> tuple[int, ...]:
    """List the ids of a target's special tokens; they stay in every cut head."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    added = (int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return tuple(sorted({*(int(i) for i in tokenizer.all_special_ids), *added}))


def _recipe(
    config: DistillConfig,
    layers: tuple[int, ...],
    text: DistillText,
    text_path: Path,
    trainer: Trainer,
) -> dict[str, object]:
    marker = read_marker(config.target)
    files = [*config.text.files, *([text_path] if text_path.is_file() else [])]
    return {
        "target": marker.source if marker else config.target.name,
        "text_sha256": [sha256_of(path) for path in files],
        "num_rows": len(text.rows),
        "num_answer_tokens": text.num_answer_tokens,
        "num_held_out_rows": len(trainer.held_rows),
        "num_left_out_rows": trainer.num_left_out,
        "layers": list(layers) or None,
        "start_weights_sha256": (
            sha256_of(config.start_from / WEIGHTS_FILE) if config.start_from else None
        ),
        "train": asdict(config.train),
        "num_threads": config.num_threads,
        "torch": str(torch.__version__),
        "curve": [asdict(point) for point in trainer.curve],
    }


def _write_student(
    config: DistillConfig,
    student: LlamaForCausalLM,
    vocab: list[int],
    recipe: dict[str, object],
) -> None:
    """Write a plain Hugging Face directory, bfloat16, with the target's tokenizer."""
    config.output.mkdir(parents=True, exist_ok=True)
    student.cpu().bfloat16()
    student.config.dtype = torch.bfloat16
    student.set_attn_implementation("eager")  # not ours: the name is unknown elsewhere
    student.save_pretrained(config.output)
    for name in _COPIED:
        if (config.target / name).is_file():
            shutil.copyfile(config.target / name, config.output / name)
    (config.output / VOCAB_FILE).write_text(json.dumps({"token_ids": vocab}) + "\n")
    (config.output / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n")
