"""The package file of a distilled draft: its own layers in int8, nothing that the target has.

Rows are scaled to 8 bits each; norms stay float32. The embedding and output head are the
target's and are put back when the draft is unpacked. Knows tensors and their files; knows no
cache folder and no training.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.errors import ModelUnavailable

_SCALE = ".scale"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
VOCAB_FILE = "draft_vocab.json"
RECIPE_FILE = "distill.json"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class DraftPackage:
    """What the `.json` beside the weights says."""

    weights_sha256: str
    """Checksum of the `.safetensors` file."""
    config: dict[str, object]
    """The draft's Hugging Face `config.json`."""
    token_ids: list[int]
    """Ids the draft's output head is worth cutting to."""
    recipe: dict[str, object]
    """How it was trained and what it reached."""


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [rows, columns] and float32 [rows]; the error is at most half a scale."""
    scale = weight.float().abs().amax(-1).clamp_min(1e-12) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def quantise_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantise a draft's matrices, keep its norms, and leave out what the target has."""
    packed: dict[str, Tensor] = {}
    for name, weight in state.items():
        if name in (EMBEDDING, HEAD):
            continue
        if weight.ndim == 2:
            packed[name], packed[name + _SCALE] = quantise_rows(weight)
        else:
            packed[name] = weight.float()
    return packed


def dequantise_state(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the float32 weights of `quantise_state`'s result."""
    return {
        name: values.float() * packed[name + _SCALE][:, None] if values.ndim == 2 else values
        for name, values in packed.items()
        if not name.endswith(_SCALE)
    }


def package_files(stem: Path) -> tuple[Path, Path]:
    """Return a package's weights and description; a dot in the stem is part of its name."""
    return stem.with_name(f"{stem.name}.safetensors"), stem.with_name(f"{stem.name}.json")


def write_package(student: Path, stem: Path) -> DraftPackage:
    """Pack a distilled draft's directory into `stem`.safetensors and `stem`.json."""
    config = json.loads((student / "config.json").read_text())
    if not config.get("tie_word_embeddings"):
        raise ModelUnavailable(f"{student}: only a draft with tied embeddings can be packed")
    weights_file, description = package_files(stem)
    save_file(quantise_state(load_file(student / WEIGHTS_FILE)), weights_file)
    weights_file.chmod(0o644)  # safetensors makes it private
    package = DraftPackage(
        weights_sha256=sha256_of(weights_file),
        config=config,
        token_ids=json.loads((student / VOCAB_FILE).read_text())["token_ids"],
        recipe=json.loads((student / RECIPE_FILE).read_text()),
    )
    description.write_text(json.dumps(asdict(package)) + "\n")
    return package


def read_package(stem: Path) -> tuple[DraftPackage, dict[str, Tensor]]:
    """Return a package's description and its float32 weights.

    Raises:
        ModelUnavailable: a file is missing, or the weights' checksum is another.
    """
    weights_file, description = package_files(stem)
    for path in (weights_file, description):
        if not path.is_file():
            raise ModelUnavailable(f"draft package: {path} is missing")
    package = DraftPackage(**json.loads(description.read_text()))
    found = sha256_of(weights_file)
    if found != package.weights_sha256:
        raise ModelUnavailable(
            f"draft package: {weights_file} has sha256 {found}, {package.weights_sha256} wanted"
        )
    return package, dequantise_state(load_file(weights_file))
