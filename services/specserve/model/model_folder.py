"""Model directories that are either whole or absent.

A directory is built beside its place, gets a marker naming every file, and is renamed into
place; two processes that build the same one both succeed, and one result stays. Knows folders
and files; knows no model.
"""

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from specserve.errors import ModelUnavailable
from specserve.model.draft_package import sha256_of

logger = logging.getLogger(__name__)

MARKER = "specserve.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a finished directory."""

    num_bytes: int
    """Its size."""
    sha256: str
    """Its checksum."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What a finished directory says about itself."""

    source: str
    """Where the files come from: hub id and revision, or package and checksum."""
    files: dict[str, FileRecord]
    """Every file but the marker."""


def read_marker(folder: Path) -> Marker | None:
    """Return a directory's marker; None where there is none or it cannot be read."""
    try:
        raw = json.loads((folder / MARKER).read_text())
        files = {name: FileRecord(**record) for name, record in raw["files"].items()}
        return Marker(source=str(raw["source"]), files=files)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_complete(folder: Path) -> bool:
    """Tell whether every file the marker names is there with its size (checksums not read)."""
    marker = read_marker(folder)
    return marker is not None and all(
        (folder / name).is_file() and (folder / name).stat().st_size == record.num_bytes
        for name, record in marker.files.items()
    )


def verify(folder: Path) -> None:
    """Check every file's checksum.

    Raises:
        ModelUnavailable: the marker or a file is missing, or a checksum is another.
    """
    marker = read_marker(folder)
    if marker is None:
        raise ModelUnavailable(f"{folder} has no readable {MARKER}: pull the model again")
    for name, record in marker.files.items():
        found = sha256_of(folder / name) if (folder / name).is_file() else "no file"
        if found != record.sha256:
            raise ModelUnavailable(
                f"{folder / name}: sha256 {found} found, {record.sha256} wanted; "
                f"remove {folder} and pull the model again"
            )


def build_folder(final: Path, fill: Callable[[Path], str]) -> Path:
    """Return `final`, building it with `fill` unless it is complete already.

    Args:
        final: where the directory belongs.
        fill: writes all files into the folder it is given and returns their source.
    """
    if is_complete(final):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        source = fill(part)
        files = {
            path.name: FileRecord(path.stat().st_size, sha256_of(path))
            for path in sorted(part.iterdir())
            if path.is_file()
        }
        (part / MARKER).write_text(json.dumps(asdict(Marker(source, files)), indent=2) + "\n")
        # mkdtemp and safetensors make private files; a cache may serve several users.
        for path in part.iterdir():
            path.chmod(0o644)
        part.chmod(0o755)
        _move_into_place(part, final)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def _move_into_place(part: Path, final: Path) -> None:
    for _ in range(3):
        try:
            part.rename(final)
            return
        except OSError:
            # A non-empty directory is there: another process was first, or it is damaged.
            if is_complete(final):
                return
            logger.warning("%s is incomplete and is replaced", final)
            with contextlib.suppress(OSError):
                broken = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
                final.rename(broken)
                shutil.rmtree(broken, ignore_errors=True)
    raise ModelUnavailable(f"{final} cannot be replaced: remove it and pull the model again")
