"""The flags of `specserve distill` and what each way of calling it does.

Three ways: train a draft (`--output`), only make a text (`--sample`), or measure a draft
(`--validate`). Knows the command line; the work is elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from specserve.config_parsing import field_docs
from specserve.errors import ConfigurationError
from specserve.model.draft_package import write_package
from specserve.tools.distill.command import DistillConfig, distill
from specserve.tools.distill.evaluate import validate_folder
from specserve.tools.distill.gather import TextConfig, gather_text
from specserve.tools.distill.recipe import TrainConfig
from specserve.tools.distill.sample import SampleConfig
from specserve.tools.distill.student import ScratchShape
from specserve.tools.flags import as_flag

_SAMPLE_FLAGS = (
    "max_user_tokens",
    "max_answer_tokens",
    "greedy_share",
    "ignore_stop_share",
    "corpus_tokens",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve distill`."""
    parser.add_argument("target", type=Path, help="Hugging Face directory of the target")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="train a draft into this directory")
    what.add_argument("--sample", type=Path, help="only make a text, into this .npz file")
    what.add_argument("--validate", type=Path, help="measure this draft on --text, train nothing")
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text", type=Path, nargs="+", default=[], help="texts made before (.npz); joined"
    )
    text.add_argument(
        "--prompts",
        type=Path,
        help="user turns for the target to answer: .jsonl (prompt, turns, messages or question), "
        "or one a line",
    )
    text.add_argument(
        "--corpus", type=Path, help="text for the target to score: .jsonl (text), or plain"
    )
    text.add_argument(
        "--num-rows",
        type=int,
        help="rows the target asks itself; default: 4608, or none where text is named",
    )
    _add_fields(text, SampleConfig(), _SAMPLE_FLAGS)
    _add_fields(text, TextConfig(), ("rows_at_once",))
    student = parser.add_argument_group("student")
    student.add_argument(
        "--layers",
        metavar="N,N,...",
        help="target layers to start from (default: the first two and the last)",
    )
    student.add_argument(
        "--scratch",
        metavar="LAYERSxHIDDEN",
        help="a small student with random weights in their place, such as 2x384",
    )
    student.add_argument(
        "--start-from",
        type=Path,
        metavar="DRAFT",
        help="a draft of this target to go on with in their place",
    )
    student.add_argument(
        "--draft-vocab-size",
        type=int,
        default=12288,
        help="most frequent ids the head is trained and cut to; special ids come on top",
    )
    student.add_argument("--pack", type=Path, help="also write PACK.safetensors and PACK.json")
    training = parser.add_argument_group("training")
    training.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    training.add_argument(
        "--num-threads",
        type=int,
        default=2,
        help="processor threads; another number may change the last bits of the weights",
    )
    _add_fields(training, TrainConfig(), [field.name for field in fields(TrainConfig)])


def _add_fields(group: argparse._ArgumentGroup, config: object, names: Sequence[str]) -> None:
    """Add a flag for each of these fields; its help is the string under the field."""
    docs = field_docs(type(config))
    for name in names:
        default = getattr(config, name)
        group.add_argument(as_flag(name), type=type(default), default=default, help=docs[name])


def parse_layers(given: str | None) -> tuple[int, ...] | None:
    """Read `0,1,29`.

    Raises:
        ConfigurationError: it is not a list of whole numbers.
    """
    if given is None:
        return None
    try:
        return tuple(int(layer) for layer in given.split(","))
    except ValueError as error:
        raise ConfigurationError(f"--layers {given!r}: numbers such as 0,1,29 wanted") from error


def parse_scratch(given: str | None) -> ScratchShape | None:
    """Read `2x384`.

    Raises:
        ConfigurationError: it is not two whole numbers.
    """
    if given is None:
        return None
    layers, _, hidden = given.partition("x")
    if not (layers.isdecimal() and hidden.isdecimal()):
        raise ConfigurationError(f"--scratch {given!r}: LAYERSxHIDDEN wanted, such as 2x384")
    return ScratchShape(int(layers), int(hidden))


def text_config(args: argparse.Namespace) -> TextConfig:
    """Return what the flags say of the text."""
    given = {name: getattr(args, name) for name in _SAMPLE_FLAGS}
    return TextConfig(
        files=tuple(args.text),
        prompts=args.prompts,
        corpus=args.corpus,
        num_invented=args.num_rows,
        sample=SampleConfig(seed=args.seed, **given),
        rows_at_once=args.rows_at_once,
    )


def run(args: argparse.Namespace) -> int:
    """Run `specserve distill`; progress goes to standard output, one line at a time."""
    torch.set_num_threads(args.num_threads)
    if args.validate is not None:
        return _validate(args)
    if args.sample is not None:
        args.sample.parent.mkdir(parents=True, exist_ok=True)
        text = gather_text(args.target, text_config(args), args.sample, args.device, _write)
        _write(f"{len(text.rows)} rows, {text.num_answer_tokens} answer tokens in {args.sample}")
        return 0
    config = DistillConfig(
        target=args.target,
        output=args.output,
        text=text_config(args),
        layers=parse_layers(args.layers),
        scratch=parse_scratch(args.scratch),
        start_from=args.start_from,
        draft_vocab_size=args.draft_vocab_size,
        device=args.device,
        num_threads=args.num_threads,
        train=TrainConfig(**{f.name: getattr(args, f.name) for f in fields(TrainConfig)}),
    )
    given = [name for name in ("layers", "scratch", "start_from") if getattr(args, name)]
    if len(given) > 1:
        flags = " and ".join(map(as_flag, given))
        raise ConfigurationError(f"{flags}: a student starts from one thing")
    if args.pack is not None and config.scratch is not None:
        raise ConfigurationError("--pack keeps the target's embedding; a scratch student has none")
    report = distill(config, _write)
    _write(f"{report.num_steps} steps; draft in {report.output}")
    if args.pack is not None:
        package = write_package(report.output, args.pack)
        _write(f"packed {args.pack}.safetensors sha256 {package.weights_sha256}")
    return 0


def _validate(args: argparse.Namespace) -> int:
    """Print the figures of a draft."""
    if not args.text:
        raise ConfigurationError("--validate needs --text: the rows to measure on")
    text = gather_text(args.target, TextConfig(files=tuple(args.text)), Path(), "cpu", _write)
    _write(str(validate_folder(args.validate, text, args.held_out_every)))
    return 0


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
