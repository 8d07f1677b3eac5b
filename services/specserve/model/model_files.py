"""The files of a model: where they lie, which hold weights, and their fingerprint.

Knows files and the model hub; knows no model. Only safetensors are read: a pickle can run any code.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from huggingface_hub import snapshot_download

from specserve.errors import ModelUnavailable

_CHUNK_BYTES = 1 << 22
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")
_NO_MATTER = ("_name_or_path", "transformers_version")
"""Keys of a configuration that say who wrote it."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve_model_dir(model: str, revision: str | None, trust_remote_code: bool) -> Path:
    """Return the directory of a model, fetching a hub id when it is none.

    Raises:
        ModelUnavailable: it is neither a directory nor to be had from the hub.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.count("/") != 1:
        hint = ""
        if path.name in ("target", "draft"):  # the names that settings of a cluster have
            hint = (
                f"; `specserve models pull --link-dir {path.parent}` lays the embedded pair there"
            )
        raise ModelUnavailable(f"{model} is neither a directory nor a hub id (owner/name){hint}")
    patterns = [*_HUB_FILES, "*.py"] if trust_remote_code else list(_HUB_FILES)
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:
        # The hub client lets errors of three libraries through, and its own upon nonsense.
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailable(f"{model} could not be fetched from the hub: {text}") from error


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """List the safetensors files of a model directory, by name.

    Raises:
        ModelUnavailable: there are none.
    """
    if not model_dir.is_dir():
        raise ModelUnavailable(f"{model_dir} is not a directory")
    files = tuple(sorted(model_dir.glob("*.safetensors")))
    if not files:
        pickles = sorted(path.name for pattern in _PICKLES for path in model_dir.glob(pattern))
        found = f"only pickled weights ({', '.join(pickles[:3])})" if pickles else "no weights"
        raise ModelUnavailable(f"{model_dir} has {found}; safetensors are wanted")
    return files


def model_fingerprint(model_dir: Path, *, is_dummy: bool, trust_remote_code: bool) -> str:
    """Hash what decides a model's tokens: weights, configuration, code of its own where it runs.

    Args:
        is_dummy: weights are made of the configuration.

    Returns:
        Hex SHA-256.

    Raises:
        ModelUnavailable: a file is missing or damaged.
    """
    files = () if is_dummy else weight_files(model_dir)
    if trust_remote_code:
        files += tuple(sorted(model_dir.glob("*.py")))
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kept = {name: value for name, value in config.items() if name not in _NO_MATTER}
    except (OSError, ValueError, AttributeError) as error:
        raise ModelUnavailable(f"{path} is damaged: {error}") from error
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode() + b"\0")
    for path in files:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
